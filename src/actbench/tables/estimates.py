"""Which simulation is the estimate of a measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from actbench.records import Case, Measurement, Record
from actbench.tables.order import HOW_MEASURED

_what = attrgetter(*(name for name in Case.model_fields if name not in HOW_MEASURED))


class Estimates:
    """The simulations among records, by what was simulated."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._found: dict[Any, list[Record]] = defaultdict(list)
        self._devices: dict[Any, _Devices] = {}
        for record in records:
            if record.case.meter == "simulated" and isinstance(record.outcome, Measurement):
                self._found[_what(record.case), record.case.device_profile == "cpu"].append(record)

    def of(self, record: Record) -> Measurement | None:
        """Return the estimate of a measurement: that of the CPU for the CPU, that of a GPU for a GPU.

        Of several simulated GPUs it is the one that the record's GPU is named like; where none is, there is no
        estimate.
        """
        key = (_what(record.case), record.case.meter == "cpu")
        if record.case.meter == "simulated" or key not in self._found:
            return None
        candidates = self._found[key]
        if len(candidates) > 1:
            if key not in self._devices:
                self._devices[key] = _Devices(candidates)
            candidates = self._devices[key].named_in(record.machine.gpu or "")
        outcome = candidates[0].outcome if len(candidates) == 1 else None
        return outcome if isinstance(outcome, Measurement) else None


class _Devices:
    """Simulations of one thing, by the first word of the device that they are of."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._by_name: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            self._by_name[(record.case.device_profile or "cuda").partition("-")[0]].append(record)
        self._lengths = sorted(set(map(len, self._by_name)))

    def named_in(self, gpu: str) -> list[Record]:
        """Return two at most of those whose device stands in the name of a GPU; there may be thousands of devices."""
        gpu = gpu.lower()
        parts = {gpu[start : start + n] for n in self._lengths for start in range(len(gpu) - n + 1)}
        return [record for part in parts if part in self._by_name for record in self._by_name[part][:2]]
