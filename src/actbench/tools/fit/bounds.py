"""Lower bounds of what the rest of a chain costs, as straight lines over the bytes held before it.

A cost is a weighted sum of ticks and units of squared error. The least cost of the blocks from one on, as a function
of the bytes held before it, is nowhere below the lines that :class:`Bounds` has, one per slope: Lagrangian bounds, with
the limit of each block's passes in its place (Fisher, The Lagrangian relaxation method for solving integer programming
problems, Management Science 27, 1981).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from actbench.tools.fit.stages import Stages, Whole

Reals = npt.NDArray[np.float64]

_SLOPES: Final = 32
"""Slopes of each weighting: more cost more time per label, and leave fewer labels."""

_FEW, _POINTS = 1000, 200
"""Labels below which each one is compared with every line; points at which the highest line is found for more."""

_PRICES: Final = 9
"""Prices of error that are tried at once."""

_ZOOMS: Final = 2
"""How often slopes and prices are chosen anew, nearer to the best."""


@dataclass(frozen=True)
class Bounds:
    """Lines below the least costs: W weightings, S slopes of each.

    Attributes:
        weights: What a tick and a unit of error cost, (W, 2).
        slopes: Cost per byte, ascending, (W, S).
        heights: Of each block, and last of the end of the chain: (W, G, S), the lines' values at no bytes held before.
        slack: Most that rounding can lift a line, (W, 1).
    """

    weights: Reals
    slopes: Reals
    heights: Sequence[Reals]
    slack: Reals

    def costs(self, place: int, group: Whole, held: Whole, ticks: Whole, errors: Whole) -> Reals:
        """Return the least costs of plans that go on from labels before a block, of each weighting, (W, labels)."""
        heights, spent = self.heights[place], self.weights[:, :1] * ticks + self.weights[:, 1:] * errors
        if len(held) < _FEW:
            lines = heights[:, group] + self.slopes[:, None] * held[:, None]
            return cast("Reals", lines.max(axis=-1) + spent - self.slack)
        # every line is a bound: take, of each label, the line that is the highest at a point near it
        points = np.linspace(held.min(), held.max() + 1, _POINTS)
        near = ((held - points[0]) / (points[1] - points[0])).astype(int)
        highest = (heights[:, :, None] + self.slopes[:, None, None] * points[:, None]).argmax(axis=-1)
        line = highest[:, group, near]
        weighting = np.arange(len(self.weights))[:, None]
        return cast("Reals", heights[weighting, group, line] + self.slopes[weighting, line] * held + spent - self.slack)


def bounds_of(stages: Stages, room: int) -> Bounds:
    """Return lines that are near the least costs of the plans that need at most ``room`` bytes."""
    weights = np.array([[1.0, 0.0]])
    if stages.most_errors is not None:
        prices = _prices(stages, room, stages.most_errors)
        weights = np.array([[1.0, 0.0], *([1.0, price] for price in prices), [0.0, 1.0]])
    slopes = _slopes(stages, weights)
    for _ in range(_ZOOMS):
        slopes = _nearer(slopes, _bounds(stages, room, weights, slopes).heights[0][:, 0])
    return _bounds(stages, room, weights, slopes)


def _bounds(stages: Stages, room: int, weights: Reals, slopes: Reals) -> Bounds:
    """Return the lines of given slopes, from the last block to the first.

    A block's option allows at most ``most`` bytes after it. A line c + s x that lies below a function of x on all
    x <= most may be lifted to any steeper line that meets it at x = most.
    """
    heights = [-slopes[:, None] * (room - stages.top)]
    by_option = slopes[:, None]
    for stage in reversed(stages.stages):
        most = room - (stage.reach - stage.held)
        lines = by_option * most[:, None]
        lifted = np.maximum.accumulate(heights[-1][:, stage.group] + lines, axis=-1)
        lifted += by_option * (stage.held - most)[:, None]
        lifted += (weights @ [stage.ticks, stage.errors])[:, :, None]
        lifted = lifted[:, None] + by_option[:, None] * stage.more[:, :, None]
        heights.append(lifted.min(axis=2))
    largest = slopes[:, -1:] * room + np.abs(heights[-1]).max(axis=(1, 2))[:, None]
    return Bounds(weights, slopes, heights[::-1], largest * len(heights) * 2.0**-50)


def _slopes(stages: Stages, weights: Reals) -> Reals:
    """Return, of each weighting, the rates at which blocks give cost for bytes along their lower hulls, and 0."""
    seen = {(stage.held.tobytes(), stage.ticks.tobytes(), stage.errors.tobytes()): stage for stage in stages.stages}
    found = [_rates(stage.held, weights @ [stage.ticks, stage.errors]) for stage in seen.values()]
    rows = []
    for rates in zip([np.zeros(1)] * len(weights), *found, strict=True):
        row = np.unique(np.concatenate(rates))
        rows.append(row[np.linspace(0, len(row) - 1, _SLOPES).round().astype(int)])
    return np.array(rows)


def _rates(held: Whole, costs: Reals) -> list[Reals]:
    """Return of each row of costs, (W, B), the slopes of the lower hull of bytes against costs that are over 0."""
    wider = held - held[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (costs[:, :, None] - costs[:, None, :]) / wider
    above = np.where(wider > 0, rates, -np.inf).max(axis=2)
    below = np.where(wider < 0, rates, np.inf).min(axis=2)
    return [row[(row > 0) & (row <= limit)] for row, limit in zip(above, below, strict=True)]


def _nearer(slopes: Reals, root: Reals) -> Reals:
    """Return slopes for each weighting; half of them are near the slope whose line is the highest at the root."""
    rows = []
    for row, height in zip(slopes, root, strict=True):
        best = int(height.argmax())
        low, high = row[max(best - 1, 0)], row[min(best + 1, len(row) - 1)]
        near = np.linspace(low, high, _SLOPES // 2 - 1)
        rows.append(np.sort(np.concatenate([row[::2], near, row[best : best + 1]])))
    return np.array(rows)


def _prices(stages: Stages, room: int, most_errors: int) -> Reals:
    """Return prices of error, in ticks per unit; the middle one gives nearly the highest bound."""
    found = [_rates(stage.errors, stage.ticks[None].astype(float))[0] for stage in stages.stages]
    prices = np.unique(np.concatenate([*found, [0.0]]))
    prices = prices[np.linspace(0, len(prices) - 1, _PRICES).round().astype(int)]
    for _ in range(_ZOOMS + 1):
        weights = np.column_stack([np.ones(len(prices)), prices])
        root = _bounds(stages, room, weights, _slopes(stages, weights)).heights[0][:, 0].max(axis=-1)
        best = int((root - prices * most_errors).argmax())
        near = prices[[max(best - 1, 0), best, min(best + 1, len(prices) - 1)]]
        prices = np.linspace(near[0], near[2], _PRICES)
    return np.asarray(near)
