"""Which simulation is the estimate of a measurement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from actbench.records import Measurement, Record


class Estimates:
    """The simulations among records.

    Args:
        records: Each with what was measured, but for the scheme.
    """

    def __init__(self, records: Iterable[tuple[Record, Any]]) -> None:
        self._found: dict[Any, list[Record]] = defaultdict(list)
        self._devices: dict[Any, _Devices] = {}
        for record, what in records:
            if record.case.meter == "simulated" and isinstance(record.outcome, Measurement):
                self._found[what, record.case.scheme, record.case.device_profile == "cpu"].append(record)

    def of(self, record: Record, what: Any) -> Measurement | None:
        """Return the estimate of a measurement: that of the CPU for the CPU, that of a GPU for a GPU.

        Of several simulated GPUs it is the one that the record's GPU is named like; where none is, there is no
        estimate.
        """
        key = (what, record.case.scheme, record.case.meter == "cpu")
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
        """Return those whose device stands in the name of a GPU, two at most of each device."""
        gpu = gpu.lower()
        parts = {gpu[start : start + length] for length in self._lengths for start in range(len(gpu) - length + 1)}
        return [record for part in parts if part in self._by_name for record in self._by_name[part][:2]]
