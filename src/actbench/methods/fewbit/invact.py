from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from actbench.errors import NothingToConvertError
from actbench.methods.fewbit.activations import function_of, instead, refuse_converted, replace_activations, why_not
from actbench.methods.fewbit.gated import GATES, inversion
from actbench.methods.fewbit.inverted import InvertedActivation
from actbench.model.gradient import Gradient
from actbench.model.provenance import Published
from actbench.packing.replacement import overwritten
from actbench.scheme.base import ACTIVATIONS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Packs
from actbench.scheme.setup import Part, TrainingSetup

_SOURCE = "abstract of arXiv 2407.15545"


class InvAct(Scheme):
    """GELU and SiLU save one bit per element in addition to their output, which the next layer saves anyway.

    Paper: "Inverted Activations: Reducing Memory Footprint in Neural Network Training", arXiv 2407.15545.
    Kept for backward: the output, and ``ceil(elements / 8)`` bytes that say on which side of the function's minimum the
    input was. If the next layer is linear or a product, the output is its saved input too, in one storage; if nothing
    else saves the output (a randomized linear layer, a pooling), the scheme frees no memory. The forward pass is exact,
    and so is the gradient up to the inversion: 1e-5 of the derivative for a float32 output, more near the minimum,
    where different inputs have nearly the same output, and for half types, which round the output.
    A layer whose output the next one in a ``nn.Sequential`` changes in place (``nn.ReLU(inplace=True)``) stays as it
    is; if the model's own code changes the output in place, the backward pass raises an error, as in PyTorch.
    Functions that the model's code calls are converted like layers.
    Not reproduced: the authors' polynomial inverses (here: linear interpolation in 2,048 cells a branch).
    """

    name: ClassVar[str] = "invact"
    card: ClassVar[Card] = Card(
        summary="GELU and SiLU save their output, which the next layer saves too, and one bit per element",
        paper="arXiv 2407.15545",
        leading=(),
        published=(
            Published(quantity="activation_ratio", value=1 / (1 - 0.231), setting="BERT", source=_SOURCE),
            Published(quantity="activation_ratio", value=1 / (1 - 0.157), setting="Mistral-7B", source=_SOURCE),
        ),
    )
    claims: ClassVar[tuple[str, ...]] = (ACTIVATIONS,)
    gradient: ClassVar[Gradient] = "exact"  # up to the inversion of an output of its type

    @property
    def facets(self) -> Iterable[Facet]:
        """One bit beside the output."""
        return (Packs(1),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace every GELU and SiLU, and the calls of them in modules' code.

        Raises:
            ConversionError: None can be replaced, or the model's activations are converted already.
        """
        refuse_converted(self.spec, setup.module)
        written = overwritten(setup.module)
        kept = {
            layer: f"{after} after it overwrites its output, which invact would keep"
            for layer, after in written.items()
        }
        found = replace_activations(setup.module, _inverted, kept)
        if not found.sites:
            raise NothingToConvertError(
                f"{self.spec}: none of {', '.join(GATES)} to convert; {found.why_not or instead(found.model)}"
            )
        return setup.changed(found.model, found.sites, found.unreached, by=Part(self.spec))


def _inverted(layer: nn.Module, like: Tensor | None) -> nn.Module | None:
    function = function_of(layer) if why_not(layer) is None else None
    if function is None or function.name not in GATES:
        return None
    return InvertedActivation(layer, inversion(function.name), function.label, like)
