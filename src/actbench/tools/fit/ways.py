"""Ways of computing other than the model's own: precisions, memory formats, adapters, and combinations of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from actbench.tools.fit import actions
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.plan import Around, training_of

_ALIKE = 1.05  # times the bytes or seconds of another way; less is no reason to look at both


def is_beaten(around: Around, needs: Mapping[Around, tuple[float, int]]) -> bool:
    """Whether another way that trains as near is about as fast and as small; of equal ways the first is kept."""
    places, mine = list(needs), needs[around]
    return any(
        training_of(other).is_as_near(training_of(around))
        and all(one <= _ALIKE * two for one, two in zip(its, mine, strict=True))
        and (math.prod(its), places.index(other)) < (math.prod(mine), places.index(around))
        for other, its in needs.items()
        if other != around
    )


def other_ways(computing: Sequence[Choice]) -> list[Around]:
    """Return the ways of computing that choices make, each alone and those that stand together."""
    kinds: dict[object, list[Choice]] = {}
    for choice in computing:
        kinds.setdefault(choice.changes, []).append(choice)
    several = itertools.product(*([None, *each] for each in kinds.values()))
    found = [frozenset(choice for choice in each if choice is not None) for each in several]
    return sorted((each for each in found if each and actions.stand_together(each)), key=len)
