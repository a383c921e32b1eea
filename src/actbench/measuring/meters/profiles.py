"""The devices that a step can be simulated for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from actbench.errors import UsageError
from actbench.results.machine import memory_bytes
from actbench.units import GIB

CUDA_BLOCK_BYTES = 512
"""What torch's CUDA allocator rounds every allocation up to."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device as far as it decides how many bytes a step needs.

    Attributes:
        memory_bytes: What torch reports as the device's total memory; the driver's own share also comes out of it.
        compute_capability: Of a CUDA device, major and minor; None for the CPU.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's operators are used: fused attention and dropout, foreach optimizers, its autocast types."""
        return self.compute_capability is not None

    @property
    def rounding_bytes(self) -> int:
        """Multiple that the allocator rounds each allocation up to."""
        return CUDA_BLOCK_BYTES if self.is_cuda else 1

    @property
    def has_tensor_float(self) -> bool:
        """Whether bfloat16, TF32 and flash attention are there: CUDA devices from Ampere (8.0) on."""
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


def _cuda(name: str, gib: float, capability: tuple[int, int]) -> DeviceProfile:
    return DeviceProfile(name, round(gib * GIB), capability)


_PROFILES = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu", memory_bytes(), None),
        _cuda("cuda-16gib", 16, (8, 0)),
        _cuda("t4", 14.7, (7, 5)),
        _cuda("v100-16gb", 15.77, (7, 0)),
        _cuda("v100-32gb", 31.74, (7, 0)),
        _cuda("rtx-2080-ti", 10.75, (7, 5)),
        _cuda("rtx-3060-12gb", 11.76, (8, 6)),
        _cuda("rtx-3080-10gb", 9.78, (8, 6)),
        _cuda("rtx-3090", 23.69, (8, 6)),
        _cuda("rtx-4060", 7.72, (8, 9)),
        _cuda("rtx-4090", 23.64, (8, 9)),
        _cuda("rtx-5090", 31.37, (12, 0)),
        _cuda("rtx-a6000", 47.54, (8, 6)),
        _cuda("a10g", 22.06, (8, 6)),
        _cuda("l4", 22.03, (8, 9)),
        _cuda("l40s", 44.4, (8, 9)),
        _cuda("a100-40gb", 39.39, (8, 0)),
        _cuda("a100-80gb", 79.15, (8, 0)),
        _cuda("h100-80gb", 79.11, (9, 0)),
        _cuda("h200", 139.8, (9, 0)),
    )
}

DEFAULT = "cuda-16gib"


def profiles() -> list[DeviceProfile]:
    """Return all profiles."""
    return list(_PROFILES.values())


def names() -> list[str]:
    """Return the names of all profiles."""
    return list(_PROFILES)


def get(name: str) -> DeviceProfile:
    """Return the profile of that name; a UsageError with close names if there is none."""
    if name in _PROFILES:
        return _PROFILES[name]
    close = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
    raise UsageError(f"--device-profile {name!r}: there is no such device profile; {hint}")
