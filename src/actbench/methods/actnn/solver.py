"""Allocates bits so that the variance of a gradient is least, on the host to layers, on the device to rows.

With b bits the error variance of a tensor is ``1 / (2**b - 1)**2`` of that with 1 bit (ActNN, arXiv 2104.14129, section
4). This is convex in b, also over any choice of bits. So each further step of a tensor gains less per bit than the one
before, and it is optimal to take the steps of all tensors in descending order of that gain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LEFT = 0.01
"""How far the greedy choice may be above the least variance, as a share of it, before tables are tried."""

CELLS = 2**21
UNITS = 2**12
"""The budget is cut into at most UNITS units, and the table of items and units has at most CELLS cells."""

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


def most_gain(gains: Floats, prices: Floats, budget: float) -> Steps:
    """Choose how many steps of each item to take, so that they gain most for the budget.

    Args:
        gains: (steps, n) gain of each step, from 0.
        prices: (steps, n) price of each step, above 0; ``gains / prices`` of each item must fall.
        budget: The budget for all items.

    Returns:
        (n,). The choice is within :data:`LEFT` of the best, or the best with prices rounded up to units, and never
        worse than the same number of steps for all; no step that still fits is left out. Of equal gains, an item with
        fewer steps comes first, then the first item.
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
    """Take the steps of the order that still fit, each after the earlier steps of its item."""
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
    """Choose by a table of the most gain of the first items for each number of units (Sinha, Zoltners 1979)."""
    levels, count = gains.shape[0] + 1, gains.shape[1]
    units = max(64, min(UNITS, CELLS // count))
    zero = np.zeros((1, count))
    gained = np.concatenate([zero, gains.cumsum(0)])
    # a price of whole units, but for its rounding error, must not take one unit more
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


WIDTHS = tuple(range(1, 9))
RAW = 32
"""The bits from which on a number has no error."""

UNSPENT = 0.001
"""Share of the budget that may stay unused: the last bits would split a tensor into two widths for no gain."""


def error_of(bits: int) -> float:
    """Return the variance relative to that at 1 bit; 0 from 32 bits on."""
    return 0.0 if bits >= RAW else 1 / (2**bits - 1) ** 2


def least_variance(costs: ArrayLike, weights: ArrayLike, budget: float, choices: Sequence[int] = WIDTHS) -> list[int]:
    """Choose bits that minimise ``sum(costs / (2**bits - 1)**2)`` while ``sum(weights * bits) <= budget``.

    The choice is exact if all weights are equal and the choices are consecutive, else within 1 %, with weights rounded
    up to a 4096th of the budget if few large items share it. As much of the budget as possible is spent: if all costs
    are 0 the bits are even.

    Args:
        costs: (n,) the variance that each item adds at 1 bit, from 0; one that is not finite counts as the largest.
        weights: (n,) elements of each item, above 0.
        budget: Bits for all elements. If even the smallest choice needs more, it is returned.
        choices: Bits to choose from, 1 or more; from 32 on an item has no error.

    Returns:
        n of the choices. Among equals, the item with fewer bits comes first, then the first item.
    """
    widths = sorted(set(choices))
    elements = np.asarray(weights, np.float64)
    gains = _sane(np.asarray(costs, np.float64)) * -np.diff([error_of(width) for width in widths])[:, None]
    prices = elements * np.diff(widths)[:, None].astype(np.float64)
    # a little more than the budget, for the rounding of its sums
    steps = most_gain(gains, prices, budget * (1 + 1e-12) - widths[0] * elements.sum())
    return [widths[step] for step in steps]


def all_spent(costs: ArrayLike, weights: ArrayLike, budget: float, choices: Sequence[int] = WIDTHS) -> list[float]:
    """Choose like :func:`least_variance`, and give the unspent bits to the items that gain most by them.

    Whole bits of few items seldom add up to the budget. The rest is less than the price of any further step, so that
    one item gets a part of a step, unless it reaches the largest choice.

    Returns:
        n bits from the smallest to the largest choice, all but one or few of them whole.
    """
    elements, widths = np.asarray(weights, np.float64), sorted(set(choices))
    steps = np.searchsorted(widths, least_variance(costs, weights, budget, choices))
    found, larger = np.asarray(widths, np.float64)[steps], np.asarray([*widths[1:], widths[-1]], np.float64)[steps]
    errors = np.asarray([error_of(width) for width in widths])
    gains = _sane(np.asarray(costs, np.float64)) * (errors - np.asarray([*errors[1:], errors[-1]]))[steps]
    prices = elements * (larger - found)
    left = budget - float((found * elements).sum())
    for item in np.argsort(-gains / np.where(prices > 0, prices, np.inf), kind="stable"):
        if left <= UNSPENT * budget:
            break
        taken = min(left, float(prices[item]))
        found[item] += taken / elements[item]
        left -= taken
    return [float(bits) for bits in found]


def _sane(costs: Floats) -> Floats:
    finite = np.isfinite(costs)
    return np.where(finite, costs, costs[finite].max(initial=0.0))


def row_widths(costs: Tensor, total_bits: int, most: int = 8) -> Tensor:
    """Choose the bits of each row as :func:`least_variance` does for equal weights, without a wait for the device.

    Args:
        costs: (N,) of a float type, the variance that each row adds at 1 bit; one that is not finite counts as the
            largest.
        total_bits: Sum of the bits, from N to ``most * N``.
        most: The most bits of a row.

    Returns:
        int32 ``(N,)`` on the device of ``costs``, from 1 to ``most``, with exactly this sum.

    Raises:
        ValueError: No bits have this sum.
    """
    rows = costs.numel()
    if not rows <= total_bits <= most * rows:
        raise ValueError(f"total_bits of {rows} rows must be from {rows} to {most * rows}, found {total_bits}")
    if isinstance(costs, FakeTensor):  # no values to sort, and fake operators take as long as real ones
        return costs.new_empty(rows, dtype=torch.int32)
    if rows == 0 or most == 1:
        return torch.ones(rows, dtype=torch.int32, device=costs.device)
    finite = costs.isfinite()
    known = torch.where(finite, costs, 0).double()
    cost = torch.where(finite, known, known.amax())
    gains = torch.stack([cost * (error_of(width) - error_of(width + 1)) for width in range(1, most)])
    # Stable, and by bits first: of equal gains the one at fewer bits comes first, so a row's steps are in order.
    order = gains.flatten().sort(descending=True, stable=True).indices
    taken = torch.zeros(order.numel(), dtype=torch.int32, device=costs.device)
    taken.scatter_(0, order[: total_bits - rows], 1)
    return taken.view(most - 1, rows).sum(0, dtype=torch.int32) + 1
