from __future__ import annotations

from typing import ClassVar

from torch import nn

from actbench.codecs.gated import GATES, inversion
from actbench.errors import NothingToConvertError
from actbench.nn.activations import called, function_of, instead, left_alone, refuse_converted, why_not
from actbench.nn.inverted import InvertedActivation
from actbench.nn.replacement import overwritten, swap
from actbench.results.fits import Gradient
from actbench.results.records import Published, Site, Unreached
from actbench.schemes.base import ACTIVATIONS, Scheme
from actbench.setup import Part, TrainingSetup

_SOURCE = "abstract of arXiv 2407.15545"


class InvAct(Scheme):
    """GELU and SiLU keep one bit per element beside their output, which the next layer keeps anyway.

    Paper: "Inverted Activations: Reducing Memory Footprint in Neural Network Training", arXiv 2407.15545.
    Kept for backward: the output, and ``ceil(elements / 8)`` bytes that say on which side of the function's minimum the
    input was. Where the next layer is a linear one or a product, the output is its saved input, one storage; where
    nothing else keeps the output (a randomized linear layer, a pooling), the scheme saves nothing. The forward pass is
    exact, and so is the gradient up to the inversion: 1e-5 of the derivative from a float32 output, more near the
    minimum, where the output hardly tells inputs apart, and from the halves, which round it.
    A layer whose output the next one in a ``nn.Sequential`` changes in place (``nn.ReLU(inplace=True)``) stays as it
    is; what the model's own code changes in place is an error in the backward pass, as in PyTorch.
    Not reproduced: the authors' polynomial inverses (here: linear interpolation in 2,048 cells a branch).
    """

    name: ClassVar[str] = "invact"
    summary: ClassVar[str] = "GELU and SiLU keep their output, which the next layer keeps too, and one bit per element"
    paper: ClassVar[str] = "arXiv 2407.15545"
    published: ClassVar[tuple[Published, ...]] = (
        Published(quantity="activation_ratio", value=1 / (1 - 0.231), setting="BERT", source=_SOURCE),
        Published(quantity="activation_ratio", value=1 / (1 - 0.157), setting="Mistral-7B", source=_SOURCE),
    )
    claims: ClassVar[tuple[str, ...]] = (ACTIVATIONS,)

    @property
    def gradient(self) -> Gradient:
        """The same, to the inversion of an output of its type."""
        return "exact"

    @property
    def claimed_bits(self) -> float:
        """Bits kept per element beside the output."""
        return 1

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace every GELU and SiLU.

        Raises:
            ConversionError: There is none that can be, or its activations have been converted before.
        """
        refuse_converted(self.spec, setup.module)
        like, written = next(setup.module.parameters(), None), overwritten(setup.module)
        sites: list[Site] = []
        unreached: list[Unreached] = []

        def rule(layer: nn.Module, path: str) -> nn.Module | None:
            unreached.extend(left_alone(layer, path))
            function = function_of(layer) if why_not(layer) is None else None
            if function is None or function.name not in GATES:
                return None
            if layer in written:
                reason = f"its output, which would be kept, is written over by {written[layer]} after it"
                unreached.append(Unreached(path=path, kind=type(layer).__name__, reason=reason))
                return None
            sites.append(Site(path=path, was=called(layer), becomes=f"{function.label} from its output and 1 bit"))
            return InvertedActivation(layer, inversion(function.name), function.label, like)

        model = swap(setup.module, rule)
        if not sites:
            raise NothingToConvertError(
                f"{self.spec}: none of {', '.join(GATES)} to convert; {_why(unreached) or instead(model)}"
            )
        return setup.changed(model, tuple(sites), tuple(unreached), by=Part(self.spec))


def _why(unreached: list[Unreached]) -> str:
    return "; ".join(f"{place.path or place.kind}: {place.reason}" for place in unreached)
