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
"""What torch's CUDA allocator rounds every allocation up to."""


@dataclass(frozen=True)
class DeviceProfile:
    """A device as far as it decides how many bytes a step needs.

    Attributes:
        memory_bytes: What torch reports as the device's total memory; the driver's own share also comes out of it.
        compute_capability: Of a CUDA device, major and minor; None for the CPU.
        rates: What it can do in a second; None where nobody says, and no time is estimated.
        measured: The share of that which operators reach on it; None for what was published of others.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    rates: Rates | None = None
    measured: Efficiencies | None = None

    @property
    def efficiencies(self) -> Efficiencies:
        """The share of its rates that operators reach."""
        return self.measured or published()

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
    """Return the profile of that name, or that in a ``.toml`` file.

    Raises:
        UsageError: There is none, with close names, or the file cannot be used.
    """
    if name in _PROFILES:
        return _PROFILES[name]
    if name.endswith(".toml"):
        return _profile(name, profilefile.read(Path(name)))
    close = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names())}"
    raise UsageError(f"--device-profile {name!r}: there is no such device profile; {hint}")
