"""Which actions on a block and which ways of computing are worth a simulation, and which plans are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from actbench.scheme.base import SAVED_TENSORS
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.effects import Effects
from actbench.tools.fit.hull import Point, near_hull
from actbench.tools.fit.plan import AS_IT_IS, Action, Around, training_of

_MOST_ACTIONS = 10  # that a plan is made of
_MOST_COMPOUNDS = 10  # that are simulated
_MOST_TOGETHER = 4  # single actions in a compound one
_MOST_SINGLES = 12  # near the hull, of which compounds are made
_SLACK = 0.02  # share of the hull's seconds that a compound may be above it, to be simulated
_MOST_EXACT, _MOST_OTHERS = 3, 5  # that another way of computing looks at
_ALIKE = 1.05  # times the bytes or seconds of another way; less is no reason to look at both


def near(way: Effects) -> list[Action]:
    """Return the actions near the lower hull of what all blocks hold and take."""
    return [action for action in near_hull(_points(way), _MOST_SINGLES) if action]


def promising(way: Effects) -> list[Action]:
    """Return actions that do several things with a block, where what they should do together is near the hull.

    A recomputed block saves only its input, so recomputation is combined with actions that pack saved tensors.
    """
    points = _points(way)
    predicted = dict(points)
    packing = [action for action in points if action and _packs(action)]
    for again, other in itertools.product(filter(recomputes, near(way)), packing):
        if stand_together(again | other):
            predicted[again | other] = _packed_input(points, again, other)
    others = [action for action in near(way) if not recomputes(action)]
    for count in range(2, _MOST_TOGETHER + 1):
        for several in itertools.combinations(others, count):
            action = frozenset[Choice]().union(*several)
            if stand_together(action):
                predicted[action] = _sum(points, several)
    nearest = [*near_hull(_exact(predicted), 0, slack=_SLACK), *near_hull(predicted, 0, slack=_SLACK)]
    return [action for action in dict.fromkeys(nearest) if action not in points][:_MOST_COMPOUNDS]


def drop(way: Effects) -> None:
    """Drop all actions but those near the hull, of exact and of other gradients."""
    points: dict[Action, Point] = {}
    for action, point in sorted(_points(way).items(), key=lambda each: len(each[0])):
        if point not in points.values():  # of several that do the same, the one of fewest parts
            points[action] = point
    kept = {AS_IT_IS, *near_hull(points, _MOST_ACTIONS), *near_hull(_exact(points), _MOST_ACTIONS // 2)}
    way.actions = {action: effect for action, effect in way.actions.items() if action in kept}


def best(way: Effects) -> list[Action]:
    """Return the few actions nearest to the hull."""
    points = _points(way)
    return list(dict.fromkeys((AS_IT_IS, *near_hull(_exact(points), _MOST_EXACT), *near_hull(points, _MOST_OTHERS))))


def recomputes(action: Action) -> bool:
    """Whether a block runs again in the backward pass."""
    return any("recomputation" in choice.changes for choice in action)


def stand_together(choices: Iterable[Choice]) -> bool:
    """Whether choices can be made together, as far as their schemes say."""
    return all(one.stands_with(two) for one, two in itertools.combinations(choices, 2))


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
    return sorted((each for each in found if each and stand_together(each)), key=len)


def _packs(action: Action) -> bool:
    return all(choice.scheme is not None and SAVED_TENSORS in choice.scheme.claims for choice in action)


def _points(way: Effects) -> dict[Action, Point]:
    """Return the bytes and seconds of all blocks, by action."""
    held, seconds = float(way.exact.held.sum()), float(way.exact.seconds.sum())
    return {
        action: (held + float(effect.costs.held.sum()), seconds + float(effect.costs.seconds.sum()))
        for action, effect in way.actions.items()
    }


def _exact(points: Mapping[Action, Point]) -> dict[Action, Point]:
    return {action: point for action, point in points.items() if training_of(action).is_exact}


def _sum(points: Mapping[Action, Point], several: Iterable[Action]) -> Point:
    """Return what several actions do together if their effects add up."""
    held, seconds = points[AS_IT_IS]
    for action in several:
        held += points[action][0] - points[AS_IT_IS][0]
        seconds += points[action][1] - points[AS_IT_IS][1]
    return max(0.0, held), seconds


def _packed_input(points: Mapping[Action, Point], again: Action, packing: Action) -> Point:
    """Return what a recomputed block does whose input is packed, if packing acts on it as on all saved tensors."""
    (all_held, quick), (held, slow) = points[AS_IT_IS], points[again]
    share = held / max(all_held, 1.0)
    return share * points[packing][0], slow + share * (points[packing][1] - quick)
