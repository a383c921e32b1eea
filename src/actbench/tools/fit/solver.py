"""The fastest option for each block of a chain, within a limit of memory and one of the gradient's error.

The bytes of a plan at a block are a sum over the blocks before it, plus what the block's own option adds. So the best
plan is a shortest path with two resources, and one pass over the blocks finds it. A label is the start of a plan: the
bytes that it holds, its time, its error. Labels are dropped that another one dominates (Irnich and Desaulniers,
Shortest path problems with resource constraints, 2005), and those whose lower bound is no better than a known plan:
the linear relaxation of what is left, which takes the cheapest bytes first (Dantzig, Discrete-variable extremum
problems, 1957).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Point = tuple[float, float]
"""Bytes and a cost, such as seconds."""

UNITS: Final = 2**52
"""Units of squared error in a squared error of 1: sums of whole units do not depend on the blocks' order."""

TICKS: Final = 2**40
"""Ticks in a second: plans whose times differ by less than one are equally fast."""

MOST_LABELS: Final = 20_000
"""Most labels of a block that are kept without a limit of error that binds."""

MOST_LABELS_BY_ERROR: Final = 2_000
"""The same with one."""

_BEAMS: Final = (32, 400)  # labels of a block that are kept in the first passes, which find good plans
_CELLS: Final = 16  # of bytes, and of error, in each of which a label is kept
_LEVELS: Final = 32  # of error at which labels are compared
_LARGEST_ERROR: Final = 16.0  # squared, of a block: sums of more would not be whole numbers of 64 bits
_ANY: Final = 2**62  # more bytes, ticks or units than any plan has


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
class _Stage:
    """The B options of a block as arrays of int64, and G groups of options of the block before it.

    Attributes:
        held: Bytes that each option holds, (B,).
        reach: Bytes that are needed from here to the last block at the least, above those held before, (B,).
        ticks: Time of each option above that of the fastest, (B,).
        errors: Units of squared error, (B,).
        more: Bytes that are held and needed more beside each group of the block before, (G, B).
        group: Group of each option for the block that follows, (B,): options of a group are equal to it.
    """

    held: Ints
    reach: Ints
    ticks: Ints
    errors: Ints
    more: Ints
    group: Ints


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, the options of each, and what is there around them.

    A plan is one index per block, into the block's options. Bytes are whole: fractions are rounded up, each figure for
    itself.

    Attributes:
        options: The options of each block.
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

    def peak(self, plan: Sequence[int]) -> float:
        """Return the most bytes of a step."""
        peak, held, before = math.ceil(self.least), math.ceil(self.base), None
        for place, (index, gradients) in enumerate(zip(plan, self._gradients_after(), strict=True)):
            option = self.options[place][index]
            if self.pairs and before is not None:
                held += math.ceil(self.pairs[place - 1].get((before, index), 0))
            peak = max(peak, held + math.ceil(option.forward), held + math.ceil(option.backward) + gradients)
            held += math.ceil(option.held)
            before = index
        return float(max(peak, held + math.ceil(self.top)))

    def time(self, plan: Sequence[int]) -> float:
        """Return the seconds of a step; the order of the blocks does not change how they are rounded."""
        return math.fsum([self.seconds, *(each.seconds for each in self._taken(plan))])

    def squared_error(self, plan: Sequence[int]) -> float:
        """Return the sum of the squared gradient errors of all blocks, in whole units of 2**-52."""
        return sum(_units(each.squared_error) for each in self._taken(plan)) / UNITS

    def _taken(self, plan: Sequence[int]) -> Iterator[Option]:
        return (options[index] for options, index in zip(self.options, plan, strict=True))

    def _gradients_after(self) -> list[int]:
        """Return the bytes of gradients that are there in the backward pass of each block."""
        left = [self.gradients_of_top, *reversed(self.gradients[1:])]
        return list(itertools.accumulate(map(math.ceil, left)))[: len(self.gradients)][::-1]

    @functools.cached_property
    def stages(self) -> Sequence[_Stage]:
        """The blocks as arrays; every block has an option."""
        pairs = self.pairs or [{}] * (len(self.options) - 1)
        groups, rows = [], [np.zeros((1, len(self.options[0])), np.int64)] if self.options else []
        for pair, (before, after) in zip(pairs, itertools.pairwise(self.options), strict=True):
            matrix = np.zeros((len(before), len(after)), np.int64)
            for key, held_more in pair.items():
                matrix[key] = math.ceil(held_more)
            row, group = np.unique(matrix, axis=0, return_inverse=True)
            rows.append(row)
            groups.append(group.reshape(-1))
        groups.append(np.zeros(len(self.options[-1]), np.int64) if self.options else np.zeros(0, np.int64))
        least, stages = np.array([math.ceil(self.top)]), list[_Stage]()  # bytes needed after a block, by its group
        made: dict[int, Ints] = {}
        for options, more, group, gradients in reversed(
            [*zip(self.options, rows, groups, self._gradients_after(), strict=False)]
        ):
            if id(options) not in made:  # equal blocks share their options
                whole = ((*map(math.ceil, (each.held, each.forward, each.backward)),) for each in options)
                costs = (
                    (round(each.seconds * TICKS), _units(min(each.squared_error, _LARGEST_ERROR))) for each in options
                )
                made[id(options)] = np.array([[*one, *two] for one, two in zip(whole, costs, strict=True)], np.int64)
            held, forward, backward, ticks, errors = made[id(options)].T
            reach = np.maximum(np.maximum(forward, backward + gradients), held + least[group])
            stages.append(_Stage(held, reach, ticks - ticks.min(), errors, more, group))
            least = (more + reach).min(axis=1)
        return stages[::-1]

    @property
    def least_bytes(self) -> float:
        """The smallest peak of all plans, whatever their error; infinite if a block has no options."""
        if not all(self.options):
            return math.inf
        first = self.stages[0] if self.stages else None
        needed = math.ceil(self.top) if first is None else int((first.more + first.reach).min())
        return max(math.ceil(self.least), math.ceil(self.base) + needed)

    @functools.cached_property
    def by_time(self) -> _Bound:
        """Lower bounds of ticks."""
        return _Bound(self.stages, [each.ticks for each in self.stages])

    @functools.cached_property
    def fewest_ticks(self) -> int:
        """Ticks of the fastest options of all blocks, above which those of stages are."""
        return sum(round(min(each.seconds for each in options) * TICKS) for options in self.options)

    def bound(self, limit: float) -> float:
        """Return seconds that no plan within a limit undercuts; infinite if there is no plan."""
        if self.least_bytes > limit:
            return math.inf
        ticks = float(self.by_time.at(0, np.array([min(limit, _ANY) - math.ceil(self.base)]))[0])
        return self.seconds + (ticks + self.fewest_ticks - len(self.options)) / TICKS


def _units(squared_error: float) -> int:
    return math.floor(squared_error * UNITS)


def lower_hull(points: Iterable[Point]) -> list[Point]:
    """Return the corners of the lower convex hull, from the fewest bytes to the lowest cost."""
    corners: list[Point] = []
    for point in sorted(set(points)):
        if corners and point[1] >= corners[-1][1]:
            continue  # another one holds no more and costs no more
        while len(corners) > 1:
            first, middle = corners[-2:]
            if (middle[1] - first[1]) * (point[0] - first[0]) < (point[1] - first[1]) * (middle[0] - first[0]):
                break
            corners.pop()  # it is on the line between its neighbours, or above it
        corners.append(point)
    return corners


class _Bound:
    """Lower bounds of a cost of the blocks from one on: the least if fractions of blocks may change.

    Args:
        stages: The blocks.
        costs: The cost of each option of each block, (B,).
    """

    def __init__(self, stages: Sequence[_Stage], costs: Sequence[npt.NDArray[np.generic]]) -> None:
        curves, segments = [(np.zeros(1), np.zeros(1))], list[Point]()
        held = cost = 0.0
        for place in reversed(range(len(stages))):
            stage = stages[place]
            # what is held until the end, and with the last block all that is needed there
            taken = (stage.reach if place == len(stages) - 1 else stage.held) + stage.more.min(axis=0)
            corners = lower_hull(zip(taken.tolist(), costs[place].tolist(), strict=True))
            held, cost = held + corners[0][0], cost + corners[0][1]
            pairs = itertools.pairwise(corners)
            segments += [((slow - fast) / (more - less), more - less) for (less, slow), (more, fast) in pairs]
            segments.sort(reverse=True)  # the first bytes more save most
            rates, widths = np.array(segments).reshape(-1, 2).T
            curves.append((held + np.cumsum([0.0, *widths]), cost - np.cumsum([0.0, *(rates * widths)])))
        self._curves = curves[::-1]

    def at(self, place: int, room: npt.NDArray[np.generic]) -> Floats:
        """Return the least cost of the blocks from ``place`` on where ``room`` has the bytes that are left, (K,)."""
        held, cost = self._curves[place]
        slack = 1 + 2.0**-46 * cost[0]  # what rounding may add
        return np.asarray(np.interp(room.astype(float), held, cost, left=np.inf) - slack)


def solve(
    chain: Chain, limit: float, most_squared_error: float = math.inf, faster_than: float = math.inf
) -> tuple[int, ...] | None:
    """Return the fastest plan whose peak is at most ``limit`` and whose error is at most ``most_squared_error``.

    Of plans that are equally fast to 2**-40 s, it is one with the smallest peak. None if no plan is within the limits;
    or perhaps if none takes less than ``faster_than`` seconds. The answer is exact unless a block has more than
    :data:`MOST_LABELS` starts of plans that may become the best, or :data:`MOST_LABELS_BY_ERROR` where the limit of
    error binds. Of those, the ones with the lowest bounds in each range of bytes and error are kept: a plan is still
    found whenever there is one, and it is within the limits, but a faster one may be missed, or one as fast that needs
    less.
    """
    if not all(chain.options):
        return None
    under = _ANY
    if faster_than < math.inf:
        under = math.ceil((faster_than - chain.seconds) * TICKS) - chain.fewest_ticks + len(chain.options) + 1
    plan, found = None, _fastest(chain, limit, most_squared_error, under)
    while found is not None:
        plan = found.plan
        # of equally fast plans, the one that needs less
        again = found.is_proved and chain.least_bytes < chain.peak(plan)
        found = _fastest(chain, chain.peak(plan) - 1, most_squared_error, found.ticks + 1) if again else None
    return plan


def least_peak(chain: Chain, most_squared_error: float = math.inf) -> tuple[int, ...]:
    """Return the plan with the smallest peak; of those, the fastest.

    Raises:
        ValueError: No plan's error is at most ``most_squared_error``.
    """
    low, needed = chain.least_bytes, chain.least_bytes
    if most_squared_error < math.inf:
        by_error, most = replace(chain, options=_with_error_as_time(chain)), _units(most_squared_error) + 1
        limit, needed, low = math.inf, math.inf, low - 1
        while low + 1 < needed:  # the plan of least error within a limit tells whether any is within both
            found = _fastest(by_error, limit, math.inf, most - by_error.fewest_ticks, any_will_do=True)
            if found is not None:
                needed = chain.peak(found.plan)
            elif needed == math.inf:
                break
            else:
                low = limit
            limit = (low + needed) // 2
    plan = solve(chain, needed, most_squared_error) if needed < math.inf else None
    if plan is None:
        raise ValueError(f"no plan has a squared error of at most {most_squared_error:g}")
    return plan


def _with_error_as_time(chain: Chain) -> list[list[Option]]:
    made = {
        id(options): [
            replace(each, seconds=_units(min(each.squared_error, _LARGEST_ERROR)) / TICKS) for each in options
        ]
        for options in chain.options
    }
    return [made[id(options)] for options in chain.options]


class _Found(NamedTuple):
    """A plan, its ticks above those of the fastest options, and whether it is certain that none is faster."""

    plan: tuple[int, ...]
    ticks: int
    is_proved: bool


def _fastest(
    chain: Chain, limit: float, most_squared_error: float, under: int, *, any_will_do: bool = False
) -> _Found | None:
    """Return the fastest plan that takes less than ``under`` ticks; if any will do, one that is found early."""
    if limit < chain.least_bytes:
        return None
    room, has_limit = math.floor(min(limit, _ANY)) - math.ceil(chain.base), most_squared_error < math.inf
    stages, most_errors, most = chain.stages, 0, MOST_LABELS
    limits: list[_Limit] = [(_SPENT, under - 1, chain.by_time)]
    if has_limit:
        # the limit of error often does not bind; without it there are few labels
        found = _fastest(chain, limit, math.inf, under)
        if found is None or chain.squared_error(found.plan) <= most_squared_error:
            return found
        most_errors, most = _units(most_squared_error), MOST_LABELS_BY_ERROR
        limits.append((_ERRORS, most_errors, _Bound(stages, [each.errors for each in stages])))
    else:
        stages = [replace(each, errors=np.zeros_like(each.errors)) for each in stages]
    found = None
    for width in (*_BEAMS, most):
        layers, is_whole = _pass(stages, limits, room, width)
        if layers[-1].shape[1]:
            found = _traced(layers)
            limits[0] = _SPENT, found.ticks - 1, chain.by_time
        if is_whole or (found and any_will_do):
            return found and found._replace(is_proved=is_whole)
    if found is None and has_limit and under == _ANY:
        # labels that were left out may have begun the only plans within both limits
        by_error = replace(chain, options=_with_error_as_time(chain))
        found = _fastest(by_error, limit, math.inf, most_errors + 1 - by_error.fewest_ticks, any_will_do=True)
    return found and found._replace(is_proved=False)


_GROUP, _HELD, _SPENT, _ERRORS, _PARENT, _OPTION = range(6)
"""Rows of labels, (6, K): the group of the last option, bytes above the chain's base, ticks, units of squared error,
the place of the label before the block that each goes on from, and the option that it takes."""

_Limit = tuple[int, float, _Bound]
"""Of a row of labels: the most that a plan may have, and lower bounds of what is to come."""


def _pass(stages: Sequence[_Stage], limits: Sequence[_Limit], room: int, width: int) -> tuple[list[Ints], bool]:
    """Return the labels after each block, and whether they are all that may begin a plan within the limits.

    At most ``width`` of a block are kept.
    """
    layers, is_whole = [np.zeros((6, 1), np.int64)], True
    for place, stage in enumerate(stages):
        before = layers[-1]
        needs = before[_HELD][:, None] + (stage.more + stage.reach)[before[_GROUP]]
        parent, option = np.nonzero(needs <= room)
        held = before[_HELD][parent] + stage.more[before[_GROUP][parent], option] + stage.held[option]
        ticks, errors = before[_SPENT][parent] + stage.ticks[option], before[_ERRORS][parent] + stage.errors[option]
        labels = np.array([stage.group[option], held, ticks, errors, parent, option])
        costs = [
            labels[row] + bound.at(place + 1, room - held) for row, _, bound in limits
        ]  # the least of what begins so
        within = np.all([cost <= limit for cost, (_, limit, _) in zip(costs, limits, strict=True)], axis=0)
        labels, least = labels[:, within], costs[0][within]
        kept = _undominated(labels)
        if len(kept) > width:
            is_whole = False
            kept = kept[_varied(labels[:, kept], least[kept], width)]
        layers.append(labels[:, kept])
    return layers, is_whole


def _undominated(labels: Ints) -> Ints:
    """Return the places of the labels that no other of their group is at least as good as in bytes, time and error.

    Errors are compared with levels, so that some labels stay that another one is as good as.
    """
    group, held, ticks, errors, *_ = labels
    order = np.lexsort((errors, ticks, held, group))
    if not len(order):
        return order
    ticks = ticks[order] - group[order] * (int(ticks.max()) + 1)  # those of a later group are below all before it
    errors = errors[order]
    levels = np.unique(errors)
    if len(levels) > _LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, _LEVELS).astype(int)]
    below = np.where(errors <= levels[:, None], ticks, _ANY)
    fastest = np.minimum.accumulate(below, axis=1)[:, :-1]
    level = np.searchsorted(levels, errors[1:], side="right") - 1
    kept = np.concatenate([[True], ticks[1:] < fastest[level, np.arange(len(level))]])
    return np.asarray(order[kept], np.int64)


def _varied(labels: Ints, least: Floats, width: int) -> Ints:
    """Return the places of ``width`` labels: those with the lowest bounds of each cell of bytes and error.

    Equal blocks make many labels of one bound, whose ends differ: so some of all sorts stay.
    """
    cell = np.zeros(labels.shape[1], np.int64)
    for each in (labels[_HELD], labels[_ERRORS]):
        lowest, highest = int(each.min()), int(each.max())
        cell = cell * _CELLS + ((each - lowest) / (highest - lowest + 1) * _CELLS).astype(np.int64)
    order = np.lexsort((least, cell))
    first = np.flatnonzero(np.diff(cell[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    return np.asarray(order[np.lexsort((least[order], rank))[:width]], np.int64)


def _traced(layers: Sequence[Ints]) -> _Found:
    """Return the plan of the fastest of the last labels."""
    place = int(layers[-1][_SPENT].argmin())
    ticks, plan = int(layers[-1][_SPENT][place]), list[int]()
    for labels in reversed(layers[1:]):
        plan.append(int(labels[_OPTION][place]))
        place = int(labels[_PARENT][place])
    return _Found(tuple(plan[::-1]), ticks, is_proved=False)
