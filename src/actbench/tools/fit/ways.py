"""Ways of computing other than the model's own: precisions, memory formats, adapters, and combinations of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from actbench.tools.fit import actions
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.plan import Around, training_of


def is_beaten(around: Around, needs: Mapping[Around, tuple[float, int]]) -> bool:
    """Whether another way that trains as near is as fast and as small; of equal ways the first is kept."""
    places = list(needs)
    return any(
        training_of(other).is_as_near(training_of(around))
        and all(one <= two for one, two in zip(needs[other], needs[around], strict=True))
        and (needs[other] != needs[around] or places.index(other) < places.index(around))
        for other in needs
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
