"""The devices that a step can be simulated for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from actbench.errors import UsageError
from actbench.measuring.cost.rates import Efficiencies, Rates, efficiencies, published, rates
from actbench.measuring.meters import profilefile
from actbench.measuring.meters.profilefile import DeviceTable
from actbench.results.machine import memory_bytes
from actbench.units import GIB

CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator rounds every allocation up to a multiple of this."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device, as far as it decides the bytes and the time of a step.

    Attributes:
        memory_bytes: The device's total memory as torch reports it; the driver also takes its share from it.
        compute_capability: Major and minor version of a CUDA device; None for the CPU.
        rates: Its peak rates; None if unknown, and then no time is estimated.
        measured: Measured shares of these rates that operators reach; None for published shares of other devices.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    rates: Rates | None = None
    measured: Efficiencies | None = None

    @property
    def efficiencies(self) -> Efficiencies:
        """The shares of its rates that operators reach."""
        return self.measured or published()

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's operators are used: fused attention and dropout, foreach optimizers, its autocast types."""
        return self.compute_capability is not None

    @property
    def rounding_bytes(self) -> int:
        """The allocator rounds each allocation up to a multiple of this."""
        return CUDA_BLOCK_BYTES if self.is_cuda else 1

    @property
    def has_tensor_float(self) -> bool:
        """Whether it has bfloat16, TF32 and flash attention: CUDA devices from Ampere (8.0) on."""
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


def _profile(name: str, table: DeviceTable) -> DeviceProfile:
    measured = None
    if table.host is not None:
        kinds = {kind: each.model_dump() for kind, each in (table.efficiencies or {}).items()}
        operators = {name: each.model_dump(exclude_none=True) for name, each in (table.operators or {}).items()}
        host = table.host.model_dump()
        known = published()
        measured = efficiencies(kinds, host, known.links, known.overlap, beside=known.kinds, operators=operators)
    return DeviceProfile(
        name,
        round(table.gib * GIB),
        table.compute_capability,
        rates(table.model_dump()) if table.has_rates else None,
        measured,
    )


_PROFILES = {"cpu": DeviceProfile("cpu", memory_bytes(), None)} | {
    name: _profile(name, table) for name, table in profilefile.shipped().items()
}

DEFAULT = "cuda-16gib"


def profiles() -> list[DeviceProfile]:
    """Return all profiles."""
    return list(_PROFILES.values())


def names() -> list[str]:
    """Return the names of all profiles."""
    return list(_PROFILES)


def get(name: str) -> DeviceProfile:
    """Return the profile of a name, or of a ``.toml`` file.

    Raises:
        UsageError: There is no such profile (the message has close names), or the file cannot be used.
    """
    if name in _PROFILES:
        return _PROFILES[name]
    if name.endswith(".toml"):
        return _profile(name, profilefile.read(Path(name)))
    close = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
    raise UsageError(f"--device-profile {name!r}: there is no such device profile; {hint}")
