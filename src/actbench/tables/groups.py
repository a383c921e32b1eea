"""Groups of records that can be compared: all but the scheme is the same in them, the machine too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any

from actbench.records import Case, Record

Group = tuple[Any, ...]
"""The machine, its GPU, and the values of ``FIELDS``."""

_HOW_MEASURED = (
    "device_profile",
    "memory_limit_bytes",
    "find_largest_batch",
    "gradient_quality",
    "seed",
    "warmup_steps",
    "min_steps",
    "min_seconds",
)
_NAMED = ("model", "batch_size", "meter", "scheme")
_WORKLOAD = tuple(name for name in Case.model_fields if name not in (*_NAMED, *_HOW_MEASURED))
_HOW = tuple(name for name in Case.model_fields if name in _HOW_MEASURED)
_BUILT_FROM = ("model", "task", "sequence_length", "image_size", "dtype", "optimizer", "trust_remote_code")

FIELDS = ("model", *_WORKLOAD, "batch_size", "meter", *_HOW)
"""Fields of the case, from the one that rows are sorted by first."""

_values = attrgetter(*FIELDS)


def group_of(record: Record) -> Group:
    """Return the group of a record."""
    return (record.machine.name, record.machine.gpu or "", *_values(record.case))


def _of(names: Iterable[str]) -> Callable[[Group], Any]:
    return itemgetter(*(2 + FIELDS.index(name) for name in names))


what_is_measured = _of(name for name in FIELDS if name != "meter" and name not in _HOW)
"""From a group: what an estimate and a measurement of the same thing have in common, but for the scheme."""

what_is_built = _of(_BUILT_FROM)
"""From a group: what the model is built from."""


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by machine, model, workload, batch size, meter and how it measured."""
    found = list(groups)
    for place in reversed(range(2 + len(FIELDS))):  # the least first: sorting leaves those in order that are equal
        if len({group[place] for group in found}) > 1:
            found.sort(key=lambda group: _sortable(group[place]))
    return found


def _sortable(value: Any) -> tuple[Any, ...]:
    """Make values of any type comparable: None first, numbers by size."""
    return value is not None, value if isinstance(value, int | float) else 0, str(value)
