"""Groups of comparable records, the order of schemes within them, and the schemes that no other beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

from actbench.errors import SpecError
from actbench.model import spec
from actbench.model.contents import content_of
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case

Group = tuple[Any, ...]
"""The machine, its GPU, the values of ``FIELDS``, and what the files of the model and of the device profile held."""

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
_BUILT_FROM = (
    *("model", "task", "sequence_length", "target_length", "image_size", "dtype", "optimizer", "trust_remote_code"),
    "script",
)

FIELDS = ("model", *_WORKLOAD, "batch_size", "meter", *_HOW)
"""Fields of the case, in the order in which rows are sorted by them."""

_values = attrgetter(*FIELDS)


def group_of(record: MeasuredRecord) -> Group:
    """Return the group of a record."""
    return (record.machine.name, record.machine.gpu or "", *_values(record.case), *content_of(record))


def varying_settings(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return, for each case by field, the settings that differ; model, scheme, batch and meter are not among them."""
    fields = [name for name in _WORKLOAD if len({getattr(case, name) for case in cases}) > 1]
    return [{name: value for name in fields if (value := getattr(case, name)) is not None} for case in cases]


def told_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as the end of a title, such as ``, sequence length 512``."""
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in settings.items())


def _of(names: Iterable[str]) -> Callable[[Group], Any]:
    """Return a function from a group to the values of some fields and what the file of the model held."""
    return itemgetter(*(2 + FIELDS.index(name) for name in names), 2 + len(FIELDS))


what_is_measured = _of(name for name in FIELDS if name != "meter" and name not in _HOW)
"""From a group to the values that an estimate and a measurement of the same thing share, apart from the scheme."""

what_is_built = _of(_BUILT_FROM)
"""From a group to the values that the model is built from."""


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by machine, then by :data:`FIELDS`."""
    found = list(groups)
    for place in reversed(range(2 + len(FIELDS))):  # the last field first: sorting is stable
        if len({group[place] for group in found}) > 1:
            found.sort(key=lambda group: _sortable(group[place]))
    return found


def _sortable(value: Any) -> tuple[Any, ...]:
    """Make values of any type comparable: None first, numbers by size."""
    return value is not None, value if isinstance(value, int | float) else 0, str(value)


def scheme_places(schemes: Iterable[str], first: Sequence[str] = ()) -> dict[str, int]:
    """Return the position of each scheme among all; two spellings of one scheme share a position.

    Those in ``first`` come first, in their order there.
    """
    given = {scheme: place for place, scheme in enumerate(first)}
    keys = {scheme: (given.get(scheme, len(given)), _key(scheme)) for scheme in set(schemes)}
    places = {key: place for place, key in enumerate(sorted(set(keys.values())))}
    return {scheme: places[key] for scheme, key in keys.items()}


def stack_of(scheme: str) -> tuple[str, ...]:
    """Return the sorted parts of a composed scheme; none for the exact model."""
    return () if scheme == "exact" else tuple(sorted(scheme.split("+")))


def _key(scheme: str) -> tuple[Any, ...]:
    """Return a sort key: the number of parts, then names, then values, as numbers if possible."""
    try:
        parts = spec.parse_spec(scheme)
    except SpecError:
        return (2, 0, scheme)
    return (scheme != "exact", len(parts), tuple((part.name, _number(part.value), str(part)) for part in parts))


def _number(value: str | None) -> float:
    try:
        number = float(value or 0)
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(number) else number  # NaN cannot be sorted


Costs = tuple[float, float]


def unbeaten(costs: Sequence[Costs]) -> list[bool]:
    """Return for each pair of costs whether no other is as low in both and lower in one; takes the time of a sort.

    Equal pairs do not beat each other. NaN neither beats nor is beaten.
    """
    known = sorted({pair for pair in costs if not any(map(math.isnan, pair))})
    beaten: set[Costs] = set()
    for pair, least in zip(known[1:], accumulate((second for _, second in known), min), strict=False):
        if least <= pair[1]:  # of an earlier pair, whose first cost is no higher
            beaten.add(pair)
    return [pair not in beaten for pair in costs]
