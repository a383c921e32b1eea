"""Which of several things of two costs no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Costs = tuple[float, float]


def unbeaten(costs: Sequence[Costs]) -> list[bool]:
    """Return for each whether no other has neither cost higher and one of them lower.

    Equal ones do not beat each other, and a cost that is no number neither beats nor is beaten. Takes as long as
    sorting them.
    """
    known = sorted({pair for pair in costs if not any(map(math.isnan, pair))})
    beaten: set[Costs] = set()
    for pair, least in zip(known[1:], accumulate((second for _, second in known), min), strict=False):
        if least <= pair[1]:  # that of one before, whose first cost is no higher
            beaten.add(pair)
    return [pair not in beaten for pair in costs]
