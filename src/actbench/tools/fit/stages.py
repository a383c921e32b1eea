"""A chain as arrays: of each block the options that may be in a best plan, in whole bytes, ticks and units of error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from actbench.tools.fit.chain import UNITS, Chain, units_of

Whole = npt.NDArray[np.int64]
TICKS: Final = 2**40
"""Ticks in a second: plans whose times differ by less than one are equally fast."""


@dataclass(frozen=True)
class Stage:
    """One block: B options that none of the others is better than, and G groups of options of the block before.

    Options of a group are alike to the block that follows. All arrays are of int64.

    Attributes:
        index: Place of each option among those of the chain's block, (B,).
        held: Bytes that each option holds, (B,).
        reach: Bytes that are needed from here to the last block at the least, above those held before, (B,).
        ticks: Time of each option above that of the fastest, (B,).
        errors: Units of squared error of each option, (B,).
        more: Bytes that are held and needed more beside each group of the block before, (G, B).
        group: Group of each option for the block that follows, (B,).
    """

    index: Whole
    held: Whole
    reach: Whole
    ticks: Whole
    errors: Whole
    more: Whole
    group: Whole

    def least(self) -> Whole:
        """Return the bytes that are needed from here on above those held before, beside each group, (G,)."""
        return np.asarray((self.more + self.reach).min(axis=1), np.int64)


@dataclass(frozen=True)
class Stages:
    """All blocks of a chain, first block first.

    Attributes:
        stages: One per block.
        top: Bytes that are needed after the last block, above those held.
        most_errors: Units of squared error that a plan may have; None if every plan may be taken.
    """

    stages: Sequence[Stage]
    top: int
    most_errors: int | None

    def with_cost(self, *, errors: bool) -> Stages:
        """Return the same without a limit of error; if ``errors``, errors stand in the place of ticks."""
        stages = (
            replace(each, ticks=each.errors if errors else each.ticks, errors=np.zeros_like(each.errors))
            for each in self.stages
        )
        return Stages(tuple(stages), self.top, None)

    def least(self) -> int:
        """Return the bytes above the chain's base without which no plan fits, whatever its error."""
        return int(self.stages[0].least()[0]) if self.stages else self.top

    def most(self) -> int:
        """Return bytes above the chain's base that suffice for every plan."""
        held = sum(max(0, int(stage.held.max() + stage.more.max())) for stage in self.stages)
        return held + max([self.top, *(int(stage.reach.max() + stage.more.max()) for stage in self.stages)])


def stages_of(chain: Chain, most_squared_error: float) -> Stages | None:
    """Return the stages of a chain without the options whose own error is too large; None if a block has none left."""
    figures = _figures(chain, most_squared_error)
    if not all(map(len, figures)):
        return None
    most_errors = None
    if sum(int(each[:, _ERRORS].max()) for each in figures) > most_squared_error * UNITS:
        most_errors = units_of(most_squared_error)
    else:
        for each in figures:
            each[:, _ERRORS] = 0
    pairs = _pairs(chain, figures)
    kept = _kept(figures, pairs)
    groups = [_groups(pair[np.ix_(*keep)]) for pair, keep in zip(pairs, itertools.pairwise(kept), strict=True)]
    gradients, stages = chain.gradients_after(), list[Stage]()
    least = np.array([math.ceil(chain.top)])
    for place in reversed(range(len(figures))):
        index, held, forward, backward, ticks, errors = figures[place][kept[place]].T
        more = groups[place - 1][1] if place else np.zeros((1, len(index)), np.int64)
        group = groups[place][0] if place < len(groups) else np.zeros(len(index), np.int64)
        reach = np.maximum(np.maximum(forward, backward + gradients[place]), held + least[group])
        stages.append(Stage(index, held, reach, ticks - ticks.min(), errors, more, group))
        least = stages[-1].least()
    return Stages(stages[::-1], math.ceil(chain.top), most_errors)


_ERRORS: Final = 5
"""Column of the units of error in a block's figures."""


def _figures(chain: Chain, most_squared_error: float) -> list[Whole]:
    """Return of each block: place, held, forward, backward, ticks and errors of its options, (B, 6)."""
    made: dict[int, Whole] = {}
    for options in chain.options:
        if id(options) not in made:
            rows = [
                (
                    place,
                    *map(math.ceil, (each.held, each.forward, each.backward)),
                    round(each.seconds * TICKS),
                    units_of(each.squared_error) if most_squared_error < math.inf else 0,
                )
                for place, each in enumerate(options)
                if each.squared_error <= most_squared_error
            ]
            made[id(options)] = np.array(rows, np.int64).reshape(-1, _ERRORS + 1)
    return [made[id(options)] for options in chain.options]


def _pairs(chain: Chain, figures: Sequence[Whole]) -> list[Whole]:
    """Return the bytes that each pair of neighbours' options holds more."""
    sides = list(itertools.pairwise(figures))
    matrices = []
    for pair, (before, after) in zip(chain.pairs or [{}] * len(sides), sides, strict=True):
        matrix = np.zeros((len(before), len(after)), np.int64)
        rows, columns = ({int(index): at for at, index in enumerate(side[:, 0])} for side in (before, after))
        for (one, other), more in pair.items():
            if one in rows and other in columns:
                matrix[rows[one], columns[other]] = math.ceil(more)
        matrices.append(matrix)
    return matrices


def _kept(figures: Sequence[Whole], pairs: Sequence[Whole]) -> list[Whole]:
    """Return of each block the places of the options that no other is at least as good as, in every figure."""
    made: dict[int, Whole] = {}
    kept = []
    for place, figure in enumerate(figures):
        columns = [pairs[place - 1].T] if place else []
        beside = np.hstack([*columns, *pairs[place : place + 1], np.zeros((len(figure), 1), np.int64)])
        if beside.any():
            kept.append(_undominated(np.hstack([figure[:, 1:], beside])))
            continue
        if id(figure) not in made:
            made[id(figure)] = _undominated(figure[:, 1:])
        kept.append(made[id(figure)])
    return kept


def _undominated(figures: Whole) -> Whole:
    """Return the rows that no other row is at most as large as in all columns; of equal rows, the first."""
    below = (figures[:, None] <= figures).all(axis=-1)
    below &= ~below.T | np.tri(len(figures), k=-1, dtype=bool).T
    return np.flatnonzero(~below.any(axis=0))


def _groups(matrix: Whole) -> tuple[Whole, Whole]:
    """Return the group of each row, equal rows being of one, and the row of each group."""
    seen: dict[bytes, int] = {}
    group = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in matrix])
    first = [int(np.flatnonzero(group == each)[0]) for each in range(len(seen))]
    return group, matrix[first]
