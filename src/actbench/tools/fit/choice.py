"""One thing to change in a training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.model.gradient import Gradient
from actbench.model.records import Optimizer
from actbench.scheme.base import GRADIENTS, Change, Scheme
from actbench.scheme.facets import LowPrecision
from actbench.tools.fit.records import Training

ADAPTS: Change = "parameters"
"""The change of schemes that train other parameters than the exact step does."""


@dataclass(frozen=True)
class Choice:
    """One thing to change in a step: a scheme, or the optimizer.

    Attributes:
        name: The specification of the scheme, or ``--optimizer NAME``.
        scheme: The scheme; None for an optimizer.
        optimizer: The optimizer; None for a scheme.
        same_updates: Whether the optimizer's updates equal those of the case's optimizer.
    """

    name: str
    scheme: Scheme | None = None
    optimizer: Optimizer | None = None
    same_updates: bool = True

    def __hash__(self) -> int:
        return hash(self.name)  # sets of choices are compared often, and schemes have many fields

    @property
    def changes(self) -> tuple[Change, ...]:
        """What the choice changes in a step."""
        return ("optimizer",) if self.scheme is None else self.scheme.changes

    @property
    def kind(self) -> str:
        """The name that all values of one scheme share: the scheme's, or the optimizer's."""
        return self.name if self.scheme is None else self.scheme.name

    @property
    def scales_loss(self) -> bool:
        """Whether it needs a scaled loss, or else gradients vanish."""
        return self._precision is not None and self._precision.scales_loss

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the device has to compute in bfloat16."""
        return self._precision is not None and self._precision.dtype == "bfloat16"

    @property
    def _precision(self) -> LowPrecision | None:
        return None if self.scheme is None else self.scheme.facet(LowPrecision)

    @property
    def takes_gradients(self) -> bool:
        """Whether it uses up the gradients before the backward pass ends."""
        return self.scheme is not None and GRADIENTS in self.scheme.claims

    @property
    def training(self) -> Training:
        """How training with this choice alone differs, as far as the scheme says without a model."""
        return self.training_of(())

    def training_of(self, warnings: Sequence[str]) -> Training:
        """Return how training with this choice alone differs, given the warnings of a simulation."""
        if self.scheme is None:
            return Training(updates="same" if self.same_updates else "other")
        changes, keeps_updates = self.changes, self.scheme.card.keeps_updates
        if keeps_updates is None:
            keeps_updates = "optimizer" not in changes
        return Training(
            trained="adapters" if ADAPTS in changes else "all",
            gradient="exact" if changes == ("precision",) else _gradient(self.scheme, warnings),
            updates="same" if keeps_updates else "other",
            precision="other" if "precision" in changes else "same",
        )

    def stands_with(self, other: Choice) -> bool:
        """Whether both can be in one stack, as far as the schemes say without a model."""
        return _stand_together(self, other)


@functools.cache  # the parts of plans are compared in pairs, the same ones for each setting
def _stand_together(one: Choice, other: Choice) -> bool:
    if one.scheme is None or other.scheme is None:  # a stack has one optimizer, and no scheme that replaces it
        return not ("optimizer" in one.changes and "optimizer" in other.changes)
    if any(scaled.scales_loss and taker.takes_gradients for scaled, taker in ((one, other), (other, one))):
        return False  # the optimizer would step with gradients of the scaled loss before they are unscaled
    try:
        schemes.build(f"{one.name}+{other.name}")
    except SpecError:
        return False
    return True


def _gradient(scheme: Scheme, warnings: Sequence[str]) -> Gradient:
    """Return a scheme's gradient on a model on which it gave these warnings.

    The parts of a batch have the gradient of the whole batch unless rows see each other; the scheme warns of that.
    """
    if "batch" in scheme.changes and any(text.startswith(f"{scheme.spec}: ") for text in warnings):
        return "approximate"
    return scheme.gradient
