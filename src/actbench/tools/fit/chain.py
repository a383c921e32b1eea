"""Blocks that run one after the other, and what each action does to each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNITS: Final = 2**52
"""Units of squared error in a squared error of 1: sums of whole units do not depend on the blocks' order."""


def units_of(squared_error: float) -> int:
    """Return a squared error in whole units, rounded down."""
    return math.floor(squared_error * UNITS)


@dataclass(frozen=True)
class Option:
    """What one action does to one block of a chain: bytes and seconds of the block, not of the model.

    Every figure is finite. Bytes may have fractions, as slopes have; a chain counts them as whole bytes, rounded up.

    Attributes:
        held: Bytes that are there after the block's forward pass and were not before it, until its backward pass.
        forward: Most bytes above those that are held before the block, while its forward pass runs.
        backward: Most bytes above those that the blocks before it hold, while its backward pass runs: its own held
            bytes, what it makes again, and temporaries.
        seconds: Time of a step that the block takes.
        squared_error: Square of the relative error of the gradients that the action brings.
    """

    held: float
    forward: float
    backward: float
    seconds: float
    squared_error: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, the options of each, and what is there around them.

    A plan is one index per block, into the block's options. Bytes are whole: fractions are rounded up, each figure for
    itself.

    Attributes:
        options: The options of each block. Equal blocks may share one object, which is then prepared once.
        pairs: One mapping per pair of neighbours ``i``, ``i + 1``: bytes that block ``i + 1`` holds more if block ``i``
            takes the first option of the key and block ``i + 1`` the second. They may be negative, and are 0 unless
            listed. Empty if no pair has any.
        base: Bytes that are there all the time: weights, optimizer state, batch, and what is held before the first
            block.
        top: Most bytes above ``base`` and what all blocks hold, between the forward and the backward pass of the last
            block: head and loss.
        gradients: Bytes of gradients that each block leaves behind once its backward pass has run. They are there in
            the backward passes of the blocks before it.
        gradients_of_top: The same of what comes after the last block.
        least: Floor of the peak that no option changes: the optimizer's step, the end of the backward pass.
        seconds: Time of a step that no option changes.
    """

    options: Sequence[Sequence[Option]]
    pairs: Sequence[Mapping[tuple[int, int], float]]
    base: float
    top: float
    gradients: Sequence[float]
    gradients_of_top: float
    least: float
    seconds: float

    def gradients_after(self) -> list[int]:
        """Return the bytes of gradients that are there in the backward pass of each block."""
        left = [self.gradients_of_top, *reversed(self.gradients[1:])]
        return list(itertools.accumulate(map(math.ceil, left)))[: len(self.gradients)][::-1]

    def peak(self, plan: Sequence[int]) -> float:
        """Return the most bytes of a step."""
        peak, held, before = math.ceil(self.least), math.ceil(self.base), None
        for place, (index, gradients) in enumerate(zip(plan, self.gradients_after(), strict=True)):
            option = self.options[place][index]
            more = math.ceil(self.pairs[place - 1].get((before, index), 0)) if self.pairs and before is not None else 0
            held += more
            peak = max(peak, held + math.ceil(option.forward), held + math.ceil(option.backward) + gradients)
            held += math.ceil(option.held)
            before = index
        return float(max(peak, held + math.ceil(self.top)))

    def time(self, plan: Sequence[int]) -> float:
        """Return the seconds of a step; the order of the blocks does not change how they are rounded."""
        return math.fsum([self.seconds, *(each.seconds for each in self._taken(plan))])

    def squared_error(self, plan: Sequence[int]) -> float:
        """Return the sum of the squared gradient errors of all blocks, in whole units of 2**-52."""
        return sum(units_of(each.squared_error) for each in self._taken(plan)) / UNITS

    def _taken(self, plan: Sequence[int]) -> Iterator[Option]:
        return (options[index] for options, index in zip(self.options, plan, strict=True))
