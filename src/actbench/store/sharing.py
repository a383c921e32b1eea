"""What records have in common, kept once in memory: a file of many rows is of few machines, versions and models."""

from __future__ import annotations

from typing import Any

from actbench.records import Data, Measurement, Record

_SITES = ("sites", "unreached")
_FIELDS_SET = "__pydantic_fields_set__"


class Shared:
    """The parts of records that were read so far.

    Args:
        sites: Whether records keep what was converted and what was not reached. No table of results shows it, and of
            many rows it takes most of the memory.
    """

    def __init__(self, sites: bool = True) -> None:
        self._sites = sites
        self._parts: dict[tuple[Any, ...], Data] = {}
        self._names: dict[frozenset[str], set[str]] = {}

    def record(self, record: Record) -> Record:
        """Return a record that nobody else has yet, with the parts of earlier ones in place of its own equal ones."""
        fields = record.__dict__
        fields["machine"] = self._part(record.machine)
        fields["versions"] = self._part(record.versions)
        if isinstance(record.outcome, Measurement):
            self._share_measurement(record.outcome)
        for part in (record, record.case, record.outcome, *record.published):
            self._share_names(part)
        return record

    def _share_measurement(self, measurement: Measurement) -> None:
        fields = measurement.__dict__
        if measurement.built is not None:
            fields["built"] = self._part(measurement.built)
        for name in _SITES:
            if fields[name]:
                fields[name] = tuple(map(self._part, fields[name])) if self._sites else ()

    def _part(self, part: Data) -> Data:
        """Return the first part that is equal to this one; the fields of such parts are texts, integers and tuples."""
        key = (type(part), *part.__dict__.values())
        found = self._parts.get(key)
        if found is None:
            self._share_names(part)
            self._parts[key] = found = part
        return found

    def _share_names(self, part: Data) -> None:
        """Share the set of the names that were given; pydantic makes one for each object, larger than its values."""
        names = part.model_fields_set
        object.__setattr__(part, _FIELDS_SET, self._names.setdefault(frozenset(names), names))
