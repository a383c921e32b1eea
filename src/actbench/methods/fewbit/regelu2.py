"""ReGELU2 and ReSiLU2: the exact activation forward, two bits backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import nn

from actbench.errors import NothingToConvertError
from actbench.methods.fewbit.activations import (
    GUISES,
    function_of,
    instead,
    refuse_converted,
    replace_activations,
    stepwise,
    why_not,
)
from actbench.methods.fewbit.gated import mixture
from actbench.methods.fewbit.tables import Table
from actbench.model.provenance import Published
from actbench.scheme.base import ACTIVATIONS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Packs
from actbench.scheme.setup import Part, TrainingSetup

_SETTING = "ReGELU2/ReSiLU2 with the authors' memory-sharing norms, fine-tuning of ViT and LLaMA"
_SOURCE = "abstract of arXiv 2406.16282"


class ReGELU2(Scheme):
    """GELU saves 2 bits per element: on which side of three thresholds it is.

    Paper: Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation",
    arXiv 2406.16282.
    Kept for backward: ``ceil(elements * 2 / 8)`` bytes. The forward pass is exact; backward uses the derivative of the
    sum of three ReLUs that is nearest to GELU in the L2 norm of the *function* (``fewbit`` takes the norm of the
    derivative).
    Not reproduced: the memory-sharing norms. Thresholds and levels are not the authors' digits, but solved from their
    objective for each form of GELU.
    """

    name: ClassVar[str] = "regelu2"
    card: ClassVar[Card] = Card(
        summary="GELU saves 2 bits per element; its derivative becomes that of a sum of three ReLUs",
        paper="Yang et al. 2024, arXiv 2406.16282",
        published=(Published(quantity="peak_saving", value=0.3, setting=_SETTING, source=_SOURCE),),
    )
    claims: ClassVar[tuple[str, ...]] = (ACTIVATIONS,)
    functions: ClassVar[tuple[str, ...]] = GUISES["gelu"]

    @property
    def facets(self) -> Iterable[Facet]:
        """Two bits an element."""
        return (Packs(2),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace every layer of the function, and its calls in modules' code.

        Raises:
            ConversionError: No such layer or call is found, or the model's activations are converted already.
        """
        refuse_converted(self.spec, setup.module)
        found = replace_activations(setup.module, partial(stepwise, self._steps_of))
        if not found.sites:
            raise NothingToConvertError(
                f"{self.spec}: none of {', '.join(self.functions)} to convert; {instead(found.model)}"
            )
        return setup.changed(found.model, found.sites, found.unreached, by=Part(self.spec))

    def _steps_of(self, layer: nn.Module) -> tuple[Table, str] | None:
        function = function_of(layer) if why_not(layer) is None else None
        if function is None or function.name not in self.functions:
            return None
        return mixture(function.name), f"2-bit {function.label} as three ReLUs"


class ReSiLU2(ReGELU2):
    """SiLU saves 2 bits per element: on which side of three thresholds it is.

    Paper: Yang et al., "Reducing Fine-Tuning Memory Overhead by Approximate and Memory-Sharing Backpropagation",
    arXiv 2406.16282.
    Kept for backward: ``ceil(elements * 2 / 8)`` bytes. The forward pass is exact; backward uses the derivative of the
    sum of three ReLUs that is nearest to SiLU in the L2 norm of the function.
    Not reproduced: the memory-sharing norms. Thresholds and levels are solved from the authors' objective.
    """

    name: ClassVar[str] = "resilu2"
    card: ClassVar[Card] = replace(
        ReGELU2.card,
        summary="SiLU saves 2 bits per element; its derivative becomes that of a sum of three ReLUs",
    )
    functions: ClassVar[tuple[str, ...]] = ("silu",)
