"""The order of rows: it depends on the cases only, not on when they were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from actbench import spec
from actbench.errors import SpecError
from actbench.records import Case, Record

HOW_MEASURED = (
    "meter",
    "device_profile",
    "memory_limit_bytes",
    "find_largest_batch",
    "gradient_quality",
    "seed",
    "warmup_steps",
    "min_steps",
    "min_seconds",
)
"""What an estimate and a measurement of the same thing may differ in."""

_WORKLOAD = tuple(name for name in Case.model_fields if name not in ("model", "batch_size", "scheme", *HOW_MEASURED))
_HOW = tuple(name for name in Case.model_fields if name in HOW_MEASURED and name != "meter")


def ordered(records: Sequence[Record]) -> list[Record]:
    """Sort records by machine, model, workload, batch size, meter, how it measured, and scheme.

    Rows that can be compared stand beside each other, the exact model first, then simple schemes, then composed ones.
    """
    found = list(records)
    for value, key in _SORTED_BY[::-1]:  # the least first: sorting leaves those in order that are equal
        places = _places(map(value, found), key)
        if len(set(places.values())) > 1:
            found.sort(key=lambda record, value=value, places=places: places[value(record)])  # type: ignore[misc]
    return found


def _places(values: Iterable[Hashable], key: Callable[[Any], Any]) -> dict[Hashable, int]:
    """Return the place of each value among all; those whose keys are equal have one place."""
    keys = {value: key(value) for value in set(values)}
    places = {key: place for place, key in enumerate(sorted(set(keys.values())))}
    return {value: places[key] for value, key in keys.items()}


def _itself(value: Any) -> Any:
    return value


def _sortable(value: Any) -> tuple[Any, ...]:
    """Make values of any type comparable: None first, numbers by size."""
    return value is not None, value if isinstance(value, int | float) else 0, str(value)


def _scheme_order(scheme: str) -> tuple[Any, ...]:
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


_SORTED_BY: tuple[tuple[Callable[[Record], Any], Callable[[Any], Any]], ...] = (
    (attrgetter("machine.name"), _itself),
    (attrgetter("machine.gpu"), lambda gpu: gpu or ""),
    (attrgetter("case.model"), _itself),
    *((attrgetter(f"case.{name}"), _sortable) for name in _WORKLOAD),
    (attrgetter("case.batch_size"), _itself),
    (attrgetter("case.meter"), _itself),
    *((attrgetter(f"case.{name}"), _sortable) for name in _HOW),
    (attrgetter("case.scheme"), _scheme_order),
)
"""What is read from a record, from the most significant, and how that is compared."""
