"""Reads bytes and seconds of a training step, on a device or in a simulation of one."""

from __future__ import annotations

from actbench.measure.meters import cudameter
from actbench.measure.meters.cpumeter import CpuMeter
from actbench.measure.meters.cudameter import CudaMeter
from actbench.measure.meters.footprint import types
from actbench.measure.meters.meter import MemoryReading, Meter
from actbench.measure.meters.snapshot import pickled
from actbench.measure.meters.watch import Watch
from actbench.model.records import Case, MeterName
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

__all__ = [
    "CpuMeter",
    "MemoryReading",
    "Meter",
    "SimulatedMeter",
    "Watch",
    "check_meter",
    "open_meter",
    "pickled",
    "types",
]


def check_meter(name: MeterName) -> None:
    """Check that the device of a meter is there; else raise a MeasurementError that names the flag."""
    if name == "cuda":
        cudameter.check_cuda()


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
