"""Reads bytes and seconds of a training step, on a device or in a simulation of one."""

from __future__ import annotations

from actbench import plugins
from actbench.errors import MeasurementError
from actbench.measuring.meters.footprint import types
from actbench.measuring.meters.meter import MemoryReading, Meter, MeterKind
from actbench.measuring.meters.snapshot import pickled
from actbench.measuring.meters.watch import Watch
from actbench.model.meters import MeterName
from actbench.model.records import Case

__all__ = ["MemoryReading", "Meter", "MeterKind", "Watch", "check_meter", "open_meter", "pickled", "types"]


def check_meter(name: MeterName) -> None:
    """Check that the device of a meter is there; else raise a MeasurementError that names the flag."""
    _kind(name).check()


def open_meter(case: Case) -> Meter:
    """Return the meter of a case; only the simulated meter reads the device profile.

    Raises:
        UsageError: There is no such device profile.
        MeasurementError: The device is missing.
    """
    return _kind(case.meter).open(case)


def _kind(name: MeterName) -> MeterKind:
    found = plugins.find_plugin("meters", name, MeterKind)
    if found is None:
        raise MeasurementError(f"--meter {name}: no installed package brings this meter, or it cannot be imported")
    return found
