"""Reads bytes and seconds of a training step, on a device or in a simulation of one."""

from __future__ import annotations

from actbench.measuring.meters import cuda, profiles
from actbench.measuring.meters.base import MemoryReading, Meter
from actbench.measuring.meters.cpu import CpuMeter
from actbench.measuring.meters.cuda import CudaMeter
from actbench.measuring.meters.footprint import types
from actbench.measuring.meters.simulated import SimulatedMeter
from actbench.measuring.meters.snapshot import pickled
from actbench.measuring.meters.watch import Watch
from actbench.results.records import Case, MeterName

__all__ = ["CpuMeter", "MemoryReading", "Meter", "SimulatedMeter", "Watch", "check", "open_meter", "pickled", "types"]


def check(name: MeterName) -> None:
    """Check that the device of a meter is there; else raise a MeasurementError that names the flag."""
    if name == "cuda":
        cuda.check()


def open_meter(case: Case) -> Meter:
    """Return the meter of a case; only the simulated meter reads the device profile.

    Raises:
        UsageError: There is no such device profile.
        MeasurementError: The device is missing.
    """
    if case.meter == "cpu":
        return CpuMeter(case.memory_limit_bytes)
    if case.meter == "cuda":
        return CudaMeter(case.memory_limit_bytes)
    return SimulatedMeter(profiles.get(case.device_profile or profiles.DEFAULT), case.memory_limit_bytes)
