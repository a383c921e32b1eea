"""The fastest action for each block of a chain within a limit of memory and one of the gradients' error.

What a plan needs in a block's passes is a sum over the blocks before it, plus what the block's own option adds: so the
best plan is a shortest path with two resources, and one pass over the blocks finds it. A label is the start of a plan:
the bytes that it holds, its time, its error. Labels that another one is at least as good as are dropped, and those
whose lower bound is not better than a plan that is known (Irnich and Desaulniers, Shortest path problems with resource
constraints, 2005; Dumitrescu and Boland, Improved preprocessing, labeling and scaling algorithms for the
weight-constrained shortest path problem, Networks 42, 2003).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from actbench.tools.fit.bounds import Bounds, Reals, bounds_of
from actbench.tools.fit.chain import UNITS, Chain
from actbench.tools.fit.stages import Stage, Stages, Whole, stages_of

MOST_LABELS: Final = 20_000
"""Most labels of a block that are kept without a limit of error that binds."""

MOST_LABELS_BY_ERROR: Final = 2_000
"""The same with one."""

_BEAMS: Final = (32, 400)
"""Labels of a block that are kept in the first passes, which find good plans."""

_CELLS: Final = 16
"""Cells of bytes, and of error, in each of which a label is kept."""

_LEVELS: Final = 32
"""Levels of error at which labels are compared."""


@dataclass(frozen=True)
class Labels:
    """Starts of plans, K of them: all arrays are of int64, (K,).

    Attributes:
        group: Group of the last option.
        held: Bytes above the chain's base.
        ticks: Time.
        errors: Units of squared error.
        parent: Place of the label that each one goes on from, among those before the block.
        option: What it does to the block, as a place among the stage's options.
    """

    group: Whole
    held: Whole
    ticks: Whole
    errors: Whole
    parent: Whole
    option: Whole

    def __len__(self) -> int:
        return len(self.held)

    def at(self, places: Whole) -> Labels:
        """Return some of the labels."""
        return Labels(*(each[places] for each in vars(self).values()))


_START: Final = Labels(*np.zeros((6, 1), np.int64))


def solve(chain: Chain, limit: float, most_squared_error: float = math.inf) -> tuple[int, ...] | None:
    """Return the fastest plan whose peak is at most ``limit`` and whose error is at most ``most_squared_error``.

    Of plans that are equally fast to 2**-40 s, it is one with the smallest peak. None if no plan is within the limits.
    The answer is exact unless a block has more than :data:`MOST_LABELS` starts of plans that may become the best, or
    :data:`MOST_LABELS_BY_ERROR` where the limit of error binds. Of those, the ones with the lowest bounds in each range
    of bytes and error are kept: a plan is still found whenever there is one, and it is within the limits, but a faster
    one may be missed, or one as fast that needs less. Without a limit of error that binds, 80 equal blocks of 10
    options have up to some 1,300 starts, 54 unequal ones some 400; with one, 32 equal blocks may have too many.
    """
    stages = stages_of(chain, most_squared_error)
    if stages is None:
        return None
    plan, found = None, _fastest(chain, stages, limit, _ANY)
    while found is not None:
        plan = found.plan
        # of equally fast plans, the one that needs less
        found = _fastest(chain, stages, chain.peak(plan) - 1, found.ticks + 1) if found.exact else None
    return plan


def least_peak(chain: Chain, most_squared_error: float = math.inf) -> tuple[int, ...]:
    """Return the plan with the smallest peak; of those, the fastest.

    Raises:
        ValueError: No plan's error is at most ``most_squared_error``.
    """
    stages = stages_of(chain, most_squared_error)
    needed = None if stages is None else _least(chain, stages)
    plan = None if needed is None else solve(chain, needed, most_squared_error)
    if plan is None:
        raise ValueError(f"no plan has a squared error of at most {most_squared_error:g}")
    return plan


def least_bytes(chain: Chain) -> float:
    """Return the smallest peak of all plans, whatever their error; infinite if a block has no options."""
    stages = stages_of(chain, math.inf)
    return math.inf if stages is None else _least_of_all(chain, stages)


def _least_of_all(chain: Chain, stages: Stages) -> int:
    return max(math.ceil(chain.least), math.ceil(chain.base) + stages.least())


def _least(chain: Chain, stages: Stages) -> float | None:
    """Return the smallest peak of the plans whose error is not too large; None if there are none."""
    low: float = _least_of_all(chain, stages)
    if stages.most_errors is None:
        return low
    # the plan of least error within a limit tells whether any is within both
    by_error = stages.with_cost(errors=True)
    under = stages.most_errors + 1
    limit, least, low = math.inf, None, low - 1
    while least is None or low + 1 < least:
        found = _fastest(chain, by_error, limit, under, any_will_do=True)
        if found is not None:
            least = chain.peak(found.plan)
        elif least is None:
            return None
        else:
            low = int(limit)
        limit = (low + int(least)) // 2
    return least


_ANY: Final = 2**62
"""More ticks than any plan takes."""


class _Found(NamedTuple):
    """A plan, its ticks above those of the fastest options, and whether it is certain that none is faster."""

    plan: tuple[int, ...]
    ticks: int
    exact: bool


def _fastest(chain: Chain, stages: Stages, limit: float, under: int, *, any_will_do: bool = False) -> _Found | None:
    """Return the fastest plan that takes less than ``under`` ticks; if any will do, one that is found early."""
    room = math.floor(min(limit, chain.base + stages.most())) - math.ceil(chain.base)
    if limit < math.ceil(chain.least) or room < stages.least():
        return None
    if stages.most_errors is not None:
        # the limit of error often does not bind; without it there are few labels
        found = _fastest(chain, stages.with_cost(errors=False), limit, under)
        if found is None or chain.squared_error(found.plan) * UNITS <= stages.most_errors:
            return found
    bounds, found = bounds_of(stages, room), None
    most = MOST_LABELS if stages.most_errors is None else MOST_LABELS_BY_ERROR
    for width in (*_BEAMS, most):
        layers, whole = _pass(stages, bounds, room, under, width)
        if len(layers[-1]):
            found = _traced(stages, layers)
            under = found.ticks
        if whole or (found and any_will_do):
            break
    if found is None and not whole and stages.most_errors is not None and under == _ANY:
        # labels that were left out may have begun the only plans within both limits
        found = _fastest(chain, stages.with_cost(errors=True), limit, stages.most_errors + 1, any_will_do=True)
    return found and found._replace(exact=whole)


def _pass(stages: Stages, bounds: Bounds, room: int, under: int, width: int) -> tuple[list[Labels], bool]:
    """Return the labels after each block, and whether they are all that may begin a plan of less than ``under`` ticks.

    At most ``width`` of a block are kept.
    """
    layers, whole = [_START], True
    ticks, errors = bounds.weights.T * [[under - 1], [stages.most_errors or 0]]
    for place, stage in enumerate(stages.stages):
        labels = _grown(layers[-1], stage, room)
        costs = bounds.costs(place + 1, labels.group, labels.held, labels.ticks, labels.errors) - errors[:, None]
        within = np.flatnonzero((costs <= ticks[:, None]).all(axis=0))
        labels, least = labels.at(within), costs[bounds.weights[:, 0] > 0][:, within].max(axis=0)
        kept = _undominated(labels)
        if len(kept) > width:
            whole = False
            kept = kept[_varied(labels.at(kept), least[kept], width)]
        layers.append(labels.at(kept))
    return layers, whole


def _grown(labels: Labels, stage: Stage, room: int) -> Labels:
    """Return the labels after a block: each label with each option that leaves room for the blocks after it."""
    needs = labels.held[:, None] + (stage.more + stage.reach)[labels.group]
    parent, option = np.nonzero(needs <= room)
    return Labels(
        stage.group[option],
        labels.held[parent] + stage.more[labels.group[parent], option] + stage.held[option],
        labels.ticks[parent] + stage.ticks[option],
        labels.errors[parent] + stage.errors[option],
        parent,
        option,
    )


def _undominated(labels: Labels) -> Whole:
    """Return the places of the labels that no other of their group is at least as good as in bytes, time and error.

    Errors are compared with levels, so that some labels stay that another one is as good as.
    """
    order = np.lexsort((labels.errors, labels.ticks, labels.held, labels.group))
    if not len(order):
        return order
    ticks = labels.ticks[order] - labels.group[order] * (int(labels.ticks.max()) + 1)
    errors = labels.errors[order]
    levels = np.unique(errors)
    if len(levels) > _LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, _LEVELS).astype(int)]
    below = np.where(errors <= levels[:, None], ticks, _ANY)
    fastest = np.minimum.accumulate(below, axis=1)[:, :-1]
    level = np.searchsorted(levels, errors[1:], side="right") - 1
    kept = np.concatenate([[True], ticks[1:] < fastest[level, np.arange(len(level))]])
    return np.asarray(order[kept], np.int64)


def _varied(labels: Labels, least: Reals, width: int) -> Whole:
    """Return the places of ``width`` labels: those with the lowest bounds of each cell of bytes and error.

    Equal blocks make many labels of one bound, whose ends differ: so some of all sorts stay.
    """
    cell = np.zeros(len(labels), np.int64)
    for each in (labels.held, labels.errors):
        lowest, highest = int(each.min()), int(each.max())
        cell = cell * _CELLS + ((each - lowest) / (highest - lowest + 1) * _CELLS).astype(np.int64)
    order = np.lexsort((least, cell))
    first = np.flatnonzero(np.diff(cell[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    return order[np.lexsort((least[order], rank))[:width]]


def _traced(stages: Stages, layers: Sequence[Labels]) -> _Found:
    """Return the plan of the fastest of the last labels."""
    place = int(layers[-1].ticks.argmin())
    ticks, plan = int(layers[-1].ticks[place]), list[int]()
    for stage, labels in zip(reversed(stages.stages), reversed(layers), strict=False):
        plan.append(int(stage.index[labels.option[place]]))
        place = int(labels.parent[place])
    return _Found(tuple(plan[::-1]), ticks, exact=False)
