"""The memory of a device that a plan may use."""

from __future__ import annotations

from actbench.simulator.profiles import DeviceProfile


def usable_bytes(profile: DeviceProfile) -> int:
    """Return the bytes of a device that a step may use, where a user sets no limit."""
    return profile.memory_bytes
