"""What a stack needs on a model of equal blocks, as two copies of the model with a few of them tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actbench import schemes
from actbench.fitting.choices import Stack, case_of
from actbench.fitting.needs import Needs
from actbench.results.measured import Measurement, Outcome
from actbench.results.records import Case
from actbench.workloads.names import with_blocks

_DEEP = 16  # blocks; of fewer, the model itself takes hardly longer than its copies
_WORTH = 4  # copies are simulated if the model has so many times the blocks of the longer one
_TRUSTED = 0.02  # share of the exact step's peak and time by which its copies may be wrong


@dataclass(frozen=True)
class Copies:
    """Two copies of a model with fewer blocks; they say which stacks are worth simulating on the model itself.

    Attributes:
        exact: The case of the exact step.
        blocks: How many equal blocks its model has.
    """

    exact: Case
    blocks: int

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """Return the cases of a stack on both copies; none if it names modules, or if the model itself is as short."""
        case = case_of(stack, self.exact)
        return tuple(case.model_copy(update={"model": with_blocks(case.model, count)}) for count in self._counts(case))

    def needs(self, stack: Stack, outcomes: Sequence[Outcome]) -> Needs | None:
        """Return what a stack needs on the whole model, from the outcomes of its cases; None if one of them failed."""
        short, long = outcomes
        if not (isinstance(short, Measurement) and isinstance(long, Measurement)):
            return None
        few, more = self._counts(case_of(stack, self.exact))
        return Needs.extended((few, short), (more, long), self.blocks)

    def _counts(self, case: Case) -> tuple[int, ...]:
        few = schemes.build(case.scheme).period or self.blocks
        return (few, 2 * few) if max(_DEEP, _WORTH * 2 * few) <= self.blocks else ()


def agree(told: Needs, found: Needs) -> bool:
    """Whether what the copies told of the exact step is what its simulation found."""
    pairs = ((told.peak, found.peak), (told.seconds, found.seconds))
    return all(abs(one - other) <= _TRUSTED * other for one, other in pairs)
