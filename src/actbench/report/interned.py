"""Records of many rows share their parts, and leave out what is not shown, so that they take less memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from actbench.model.data import Data
from actbench.model.measured import Measurement
from actbench.model.records import Record

_SITES = ("sites", "unreached")
UNTABLED: Final = (*_SITES, "blocks")
"""Fields of a measurement that no table shows; they take most of the memory of many rows."""
UNCOMPARED: Final = (
    *UNTABLED,
    "gradients_bytes",
    "optimizer_bytes",
    "reserved_bytes",
    "host_bytes",
    "process_bytes",
    "memory_limit_bytes",
    "rank_peak_bytes",
    "peak_parts",
    "remedies",
    "phase_peaks",
    "estimated",
    "communication",
    "untimed",
    "exact_step_seconds",
    "largest_batch_search",
    "diagnostics",
    "warnings",
    "timeline",
)
"""Fields of a measurement that a comparison of two files does not show."""
_NESTED = ("peak_parts", "phase_peaks", "estimated", "largest_batch_search", "mesh", "timeline", "blocks")
"""Fields of a measurement that have fields of their own."""
_ALIKE = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "memory_limit_bytes")
"""Amounts that rows of one model have in common."""
_FIELDS_SET = "__pydantic_fields_set__"


class Interned:
    """The parts of records read so far, which later records share.

    ``without`` and ``like`` are as of :func:`read_all`.
    """

    def __init__(self, without: Collection[str] = (), like: Sequence[Record[Any, Any]] = ()) -> None:
        # All share one dictionary of extra fields: of older records it was emptied when they were read. Pydantic reads
        # there what a record itself lacks, so it holds what is left out, and the records' own dictionaries get smaller.
        self._without = {name: Measurement.model_fields[name].default for name in without}
        self._cases = {record.case: record.case for record in like}
        self._texts: dict[str, str] = {}
        self._counts: dict[int, int] = {}
        self._parts: dict[tuple[Any, ...], Data] = {}
        self._names: dict[frozenset[str], set[str]] = {}

    def share(self, record: Record[Any, Any]) -> None:
        """Replace parts of a new record by equal parts of earlier records."""
        fields = record.__dict__
        fields["machine"] = self._part(record.machine)
        fields["versions"] = self._part(record.versions)
        if self._cases:
            fields["case"] = self._cases.get(record.case, record.case)
        fields["command"] = self._texts.setdefault(record.command, record.command)
        if isinstance(record.outcome, Measurement):
            self._share_measurement(record.outcome)
        for part in (record, record.case, record.outcome, *record.published):
            self._share_names(part)

    def _share_measurement(self, measurement: Measurement) -> None:
        fields = measurement.__dict__
        if self._without:
            _leave_details_out(measurement)
            fields = {name: value for name, value in fields.items() if name not in self._without}
            object.__setattr__(measurement, "__dict__", fields)
        object.__setattr__(measurement, "__pydantic_extra__", self._without)
        if measurement.built is not None:
            fields["built"] = self._part(measurement.built)
        if measurement.untimed is not None and "untimed" in fields:
            fields["untimed"] = self._texts.setdefault(measurement.untimed, measurement.untimed)
        for name in _SITES:
            if fields.get(name):
                fields[name] = tuple(map(self._part, fields[name]))
        self._share_amounts(fields)
        for name in _NESTED:
            if name in fields and fields[name] is not None:
                self._share_names(fields[name])
                self._share_amounts(fields[name].__dict__)

    def _share_amounts(self, values: dict[str, Any]) -> None:
        for name in _ALIKE:
            if name in values and values[name] is not None:
                values[name] = self._counts.setdefault(values[name], values[name])

    def _part(self, part: Data) -> Data:
        """Return the first part that equals this one; the fields of parts are texts, integers and tuples."""
        key = (type(part), *part.__dict__.values())
        found = self._parts.get(key)
        if found is None:
            self._share_names(part)
            self._parts[key] = found = part
        return found

    def _share_names(self, part: Data) -> None:
        """Share pydantic's set of given fields, which takes more memory than their values."""
        names = part.__pydantic_fields_set__  # as part.model_fields_set, which is one more call for each part
        object.__setattr__(part, _FIELDS_SET, self._names.setdefault(frozenset(names), names))


def _leave_details_out(measurement: Measurement) -> None:
    """Leave out what no table of many rows shows of estimated times and of the search of the largest batch."""
    if measurement.estimated is not None:
        measurement.estimated.__dict__["by_operator"] = ()
    search = measurement.largest_batch_search
    if search is not None and search.estimated_step_seconds is None:
        measurement.__dict__["largest_batch_search"] = None
