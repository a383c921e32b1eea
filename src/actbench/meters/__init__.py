"""Reading bytes and seconds of a training step, on a device or in a simulation of one."""

from __future__ import annotations

from actbench.meters import cuda, profiles
from actbench.meters.base import MemoryReading, Meter
from actbench.meters.cpu import CpuMeter
from actbench.meters.cuda import CudaMeter
from actbench.meters.holdings import types
from actbench.meters.simulated import SimulatedMeter
from actbench.records import Case, MeterName

__all__ = ["MemoryReading", "Meter", "check", "open_meter", "types"]


def check(name: MeterName) -> None:
    """Check that the device of a meter is there, before anything is built for it.

    Raises:
        MeasurementError: It is not; the message names the flag.
    """
    if name == "cuda":
        cuda.check()


def open_meter(case: Case) -> Meter:
    """Return the meter of a case; the device profile is the simulated meter's alone, the others read a real device.

    Raises:
        UsageError: There is no such device profile.
        MeasurementError: The device is not there.
    """
    if case.meter == "cpu":
        return CpuMeter(case.memory_limit_bytes)
    if case.meter == "cuda":
        return CudaMeter(case.memory_limit_bytes)
    return SimulatedMeter(profiles.get(case.device_profile or profiles.DEFAULT), case.memory_limit_bytes)
