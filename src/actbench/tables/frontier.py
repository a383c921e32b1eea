"""Which of several things of two costs no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence

Costs = tuple[float, float]


def unbeaten(costs: Sequence[Costs]) -> list[bool]:
    """Return for each whether no other has neither cost higher and one of them lower.

    Equal ones do not beat each other, and a cost that is no number neither beats nor is beaten. Takes as long as
    sorting them.
    """
    known = sorted({pair for pair in costs if not any(map(math.isnan, pair))})
    beaten: set[Costs] = set()
    least = math.inf  # second cost of those before, whose first is no higher
    for pair in known:
        if least <= pair[1]:
            beaten.add(pair)
        least = min(least, pair[1])
    return [pair not in beaten for pair in costs]
