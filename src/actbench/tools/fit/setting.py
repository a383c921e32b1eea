"""What is changed around the blocks, and the plans that go with that."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actbench.tools.fit.chain import Chain
from actbench.tools.fit.hull import Point, least_seconds, lower_hull
from actbench.tools.fit.plan import Action, Around, Plan

_MOST_ROWS = 4  # rows of equal blocks whose orders are tried


@dataclass(frozen=True)
class Solved:
    """A plan, with what the costs of its parts add up to: its peak in bytes, and its time in seconds."""

    plan: Plan
    peak: float
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What is changed around the blocks, and what their options then are.

    Attributes:
        around: The changes.
        rest: What is done with the modules outside of the blocks.
        actions: What may be done with a block.
        chain: The blocks with these options.
        squared_error: Of the gradient, from outside of the blocks.
    """

    around: Around
    rest: Action
    actions: Sequence[Action]
    chain: Chain
    squared_error: float = 0.0

    @functools.cached_property
    def hulls(self) -> list[tuple[Sequence[Point], int]]:
        """The lower hull of each kind of block, with their number."""
        counts = Counter(map(id, self.chain.options))
        kinds = {id(options): options for options in self.chain.options}
        return [
            (lower_hull((each.held, each.seconds) for each in options), counts[key]) for key, options in kinds.items()
        ]

    @functools.cached_property
    def quickest(self) -> float:
        """Seconds of the fastest plan if memory is no limit."""
        return self.bound(math.inf)

    @functools.cached_property
    def least_squared_error(self) -> float:
        """The least squared error of the gradient of a plan."""
        of_blocks = (min(each.squared_error for each in options) for options in self.chain.options)
        return self.squared_error + math.fsum(of_blocks)

    def bound(self, limit: float) -> float:
        """Return seconds that no plan within a limit undercuts."""
        if max(self.chain.least, self.chain.base + self.chain.top * (not self.chain.options)) > limit:
            return math.inf
        pairs = sum(min(each.values(), default=0.0) for each in self.chain.pairs if min(each.values(), default=0.0) < 0)
        room = limit - self.chain.base - self.chain.top - pairs
        return self.chain.seconds + least_seconds(self.hulls, room)

    def solved(self, indices: Sequence[int]) -> Solved:
        """Return the plan of the chosen options."""
        indices = self._in_rows(indices)
        actions = tuple(self.actions[index] for index in indices)
        plan = Plan(self.around, actions if any(actions) else (), self.rest)
        return Solved(plan, self.chain.peak(indices), self.chain.time(indices))

    def of_some(self, slowest: float) -> Iterator[Solved]:
        """Yield the plans that do one thing with some of the blocks, and take at most so many seconds.

        These are the first k, the last k, or every second or fourth.
        """
        nothing = next((place for place, each in enumerate(self.actions) if not each), None)
        if nothing is None:
            return
        count = len(self.chain.options)
        some = [range(first, last) for k in range(1, count) for first, last in ((0, k), (count - k, count))]
        some += [range(0, count, every) for every in (2, 4)]
        for index in (place for place, each in enumerate(self.actions) if each):
            for chosen in some:
                indices = [index if place in chosen else nothing for place in range(count)]
                if self.chain.time(indices) <= slowest:
                    yield self.solved(indices)

    def _in_rows(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the same options, those of equal blocks in rows, in the order that needs least.

        Only where the rows need no more: which of equal blocks come first may matter.
        """
        places: dict[int, list[int]] = {}
        for place, options in enumerate(self.chain.options):
            places.setdefault(id(options), []).append(place)
        best, peak = tuple(indices), self.chain.peak(indices)
        taken = [index for index in dict.fromkeys(indices) if indices.count(index) > 1]
        for order in itertools.permutations(taken if len(taken) <= _MOST_ROWS else taken[:1]):
            found = list(indices)
            for alike in places.values():
                row = sorted((indices[place] for place in alike), key=lambda index: (*order, index).index(index))
                for place, index in zip(alike, row, strict=True):
                    found[place] = index
            if (again := self.chain.peak(found)) <= peak and tuple(found) != best:
                best, peak = tuple(found), again
        return best
