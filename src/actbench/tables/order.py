"""The order of schemes in a table: the exact model first, then simple schemes, then composed ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from actbench import spec
from actbench.errors import SpecError


def scheme_places(schemes: Iterable[str]) -> dict[str, int]:
    """Return the place of each scheme among all; one that is written in two ways has one place."""
    keys = {scheme: _key(scheme) for scheme in set(schemes)}
    places = {key: place for place, key in enumerate(sorted(set(keys.values())))}
    return {scheme: places[key] for scheme, key in keys.items()}


def _key(scheme: str) -> tuple[Any, ...]:
    """Order schemes by the number of their parts, then by name, then by value as a number where it is one."""
    try:
        parts = spec.parse(scheme)
    except SpecError:
        return (2, 0, scheme)
    return (scheme != "exact", len(parts), tuple((part.name, _number(part.value), str(part)) for part in parts))


def _number(value: str | None) -> float:
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(number) else number  # which has no place among numbers
