"""Steps of items that gain most for a budget: by gain per price, and where that leaves much, by dynamic programming.

Each item's steps are taken one after the other, and each gains less per price than the one before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEFT = 0.01
"""Share of what is left over by which the greedy choice may be above the least before the other one is asked."""

CELLS = 2**21
UNITS = 2**12
"""The budget is cut into so many units at most, and the table of items and units has at most so many cells."""

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


def most_gain(gains: Floats, prices: Floats, budget: float) -> Steps:
    """Choose how many steps of each item are taken, so that they gain most for the budget.

    Args:
        gains: (steps, n) what each step gains, from 0.
        prices: (steps, n) what it costs, above 0; of each item, ``gains / prices`` must fall.
        budget: For all.

    Returns:
        (n,). Within :data:`LEFT` of the best, or the best but for prices rounded up to units, and never less than the
        same number of steps for all; no step that still fits is left out. Of equals, an item with fewer steps is
        served first, then the first.
    """
    order = np.argsort(-(gains / prices), axis=None, kind="stable")  # by step first, so the steps of an item ascend
    spent = prices.flatten()[order].cumsum()
    first = int(np.searchsorted(spent, budget, side="right"))
    begun = np.bincount(order[:first] % max(1, gains.shape[1]), minlength=gains.shape[1])
    greedy = _filled(begun, order[first:], prices, budget)
    if first == len(order):
        return greedy
    share = (budget - (spent[first - 1] if first else 0.0)) / prices.flat[order[first]]
    bound = gains.flatten()[order[:first]].sum() + share * gains.flat[order[first]]
    if bound - _gained(gains, greedy) <= LEFT * (gains.sum() - bound):
        return greedy
    even = np.full_like(greedy, np.searchsorted(prices.sum(1).cumsum(), budget, side="right"))
    others = [_filled(steps, order, prices, budget) for steps in (even, _by_tables(gains, prices, budget))]
    return max(greedy, *others, key=lambda steps: _gained(gains, steps))


def _gained(gains: Floats, steps: Steps) -> float:
    return float(np.where(np.arange(len(gains))[:, None] < steps, gains, 0).sum())


def _filled(steps: Steps, order: NDArray[np.int64], prices: Floats, budget: float) -> Steps:
    """Take what steps of the order still fit, each behind those of its item before it."""
    count = prices.shape[1]
    left = budget - float(np.where(np.arange(len(prices))[:, None] < steps, prices, 0).sum())
    cheapest = prices.min(initial=np.inf)
    for place, price in zip(order.tolist(), prices.flatten()[order].tolist(), strict=True):
        if left < cheapest:
            break
        step, item = divmod(place, count)
        if price <= left and step == steps[item]:
            steps[item] += 1
            left -= price
    return steps


def _by_tables(gains: Floats, prices: Floats, budget: float) -> Steps:
    """Choose by the most gain that the items so far have for each number of units (Sinha, Zoltners 1979)."""
    levels, count = gains.shape[0] + 1, gains.shape[1]
    units = max(64, min(UNITS, CELLS // count))
    zero = np.zeros((1, count))
    gained = np.concatenate([zero, gains.cumsum(0)])
    needed = np.ceil(np.concatenate([zero, prices.cumsum(0)]) * (units / budget) - 1e-9).astype(np.int64)
    best, chosen = np.zeros(units + 1), np.zeros((count, units + 1), np.uint8)
    for item in range(count):
        tried = np.full((levels, units + 1), -np.inf)
        for level, need in enumerate(needed[:, item].tolist()):
            if need <= units:
                tried[level, need:] = best[: units + 1 - need] + gained[level, item]
        chosen[item], best = tried.argmax(0), tried.max(0)
    steps, left = np.zeros(count, np.int64), units
    for item in reversed(range(count)):
        steps[item] = chosen[item, left]
        left -= needed[steps[item], item]
    return steps
