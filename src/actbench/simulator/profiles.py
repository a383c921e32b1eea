"""The devices that a step can be simulated for: the shipped ones, and those of the user's own files."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
from pydantic import AfterValidator, Field, ValidationError

from actbench.errors import UsageError
from actbench.machine import memory_bytes
from actbench.model.context import CONTEXT_BYTES
from actbench.model.data import Data
from actbench.model.declared import DEFAULT_DEVICE, device_named
from actbench.model.records import Case
from actbench.paths import read_toml
from actbench.simulator.cost.rates import Efficiencies, Rates, efficiencies, published, rates
from actbench.simulator.reductions import Processors
from actbench.units import GIB
from actbench.validation import explain

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # true is none
# What no device is near, and nothing computed from which overflows or vanishes.
Gib = Annotated[_Number, Field(ge=2**-10, le=2**20)]
Rate = Annotated[_Number, Field(ge=1e-6, le=1e6)]
Microseconds = Annotated[_Number, Field(ge=1e-6, le=1e9)]
Delay = Annotated[_Number, Field(ge=0, le=1e9)]
Share = Annotated[_Number, Field(ge=1e-6, le=1.5)]
Amount = Annotated[_Number, Field(ge=1e-6, le=1e18)]
Version = Annotated[int, Field(strict=True, ge=0, lt=1000)]


class KindTable(Data):
    """The shares of rates that one kind of operator reaches; see ``simulator/cost/efficiencies.toml``."""

    fp32: Share | None = None
    tf32: Share | None = None
    half: Share | None = None
    fp8: Share | None = None
    memory: Share
    ramp: Delay


_TIMED = ("fp32", "bandwidth", "link", "launch", "peer", "network", "devices")
"""Fields that concern times alone."""

Point = tuple[Amount, Microseconds] | tuple[Amount, Amount, Microseconds]


def _alike(points: list[Point]) -> list[Point]:
    if len({len(point) for point in points}) > 1:
        raise ValueError("points of an operator are all pairs or all triples")
    if len(points[0]) == 2 and any(after[0] <= before[0] for before, after in pairwise(points)):
        raise ValueError("the bytes of an operator grow from pair to pair")
    return points


Points = Annotated[list[Point], Field(min_length=1), AfterValidator(_alike)]


class OperatorTable(Data):
    """Times of one operator: pairs of bytes and microseconds, or triples of operations, bytes and microseconds."""

    fp32: Points | None = None
    tf32: Points | None = None
    half: Points | None = None
    fp8: Points | None = None


class HostTable(Data):
    """The host's time for an operator in microseconds, and its memory's bandwidth in GB/s."""

    forward: Microseconds
    backward: Microseconds
    optimizer: Microseconds | None = None  # None: as forward
    view: Microseconds
    packing: Microseconds
    listed: Microseconds
    bandwidth: Rate


class DeviceTable(Data):
    """A device; see ``simulator/devices.toml``. A file of one device may have its own efficiencies."""

    also: tuple[str, ...] = ()
    gib: Gib
    compute_capability: tuple[Version, Version] | None = None
    processors: Annotated[int, Field(strict=True, gt=0, le=2**20)] | None = None
    fp32: Rate | None = None
    tf32: Rate | None = None
    half: Rate | None = None
    fp8: Rate | None = None
    bandwidth: Rate | None = None
    link: Rate | None = None
    launch: Delay | None = None
    peer: Rate | None = None  # that of link
    devices: Annotated[int, Field(strict=True, gt=0, le=2**20)] = 8
    # one network card of 100 Gbit/s
    network: Rate = 12.5
    machine: str = ""
    sustained: Share = 1.0
    source: str = ""
    host: HostTable | None = None
    efficiencies: dict[str, KindTable] | None = None
    operators: dict[str, OperatorTable] | None = None

    @property
    def has_rates(self) -> bool:
        """Whether it has all rates that an estimate of time needs."""
        return None not in (self.fp32, self.bandwidth, self.link, self.launch)


@functools.cache
def shipped() -> dict[str, DeviceTable]:
    """Return the shipped devices, by name."""
    text = resources.files("actbench.simulator").joinpath("devices.toml").read_text(encoding="utf-8")
    return {name: DeviceTable.model_validate(table) for name, table in tomllib.loads(text).items()}


def read_device_table(path: Path) -> DeviceTable:
    """Return the device of a user's file; a UsageError if it cannot be read, or describes no possible device."""
    flag = f"--device-profile {str(path)!r}"
    found = read_toml(path, flag, UsageError)
    try:
        table = DeviceTable.model_validate(found)
    except ValidationError as error:
        sections: dict[str, type[Data]] = {
            "": DeviceTable,
            "host": HostTable,
            "efficiencies": KindTable,
            "operators": OperatorTable,
        }
        raise UsageError(f"{flag}: {'; '.join(explain(error, found, sections))}") from None
    unknown = set(table.efficiencies or {}) - published().kinds.keys()
    if unknown:
        raise UsageError(
            f"{flag}: there is no kind of operator {', '.join(sorted(unknown))}; known: {', '.join(published().kinds)}"
        )
    if (table.efficiencies or table.operators) and table.host is None:
        raise UsageError(f"{flag}: efficiencies and operators need the table [host], too")
    some = [name for name in _TIMED if name in table.model_fields_set]
    if some and not table.has_rates:
        raise UsageError(f"{flag}: fp32, bandwidth, link and launch belong together; it has {', '.join(some)}")
    return table


_USUAL_PROCESSORS = 108
"""Multiprocessors of a device whose file does not say how many it has: those of an A100."""

CUDA_BLOCK_BYTES = 512
"""torch's CUDA allocator rounds every allocation up to a multiple of this."""


TorchVersion: TypeAlias = tuple[int, int]


def version_of(text: str) -> TorchVersion:
    """Return the major and minor number of a version."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


INSTALLED_TORCH = version_of(torch.__version__)


@dataclass(frozen=True)
class DeviceProfile:
    """A device, as far as it decides the bytes and the time of a step.

    Attributes:
        memory_bytes: The device's total memory as torch reports it; the driver also takes its share from it.
        compute_capability: Major and minor version of a CUDA device; None for the CPU.
        multiprocessors: How many a CUDA device has.
        torch: The version of torch that runs on it.
        workspaces: Whether what CUDA's libraries allocate for themselves counts.
        rates: Its peak rates; None if unknown, and then no time is estimated.
        measured: Measured shares of these rates that operators reach; None for published shares of other devices.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    rates: Rates | None = None
    measured: Efficiencies | None = None
    multiprocessors: int = 1
    torch: TorchVersion = INSTALLED_TORCH
    workspaces: bool = True

    @property
    def efficiencies(self) -> Efficiencies:
        """The shares of its rates that operators reach."""
        return self.measured or published()

    @property
    def is_cuda(self) -> bool:
        """Whether CUDA's operators are used: fused attention and dropout, foreach optimizers, its autocast types."""
        return self.compute_capability is not None

    def step_bytes(self, limit_bytes: int | None = None) -> int:
        """Return the memory that a step may take: a limit as it was given, or what a CUDA context leaves of it."""
        if limit_bytes is not None:
            return limit_bytes
        return max(1, self.memory_bytes - CONTEXT_BYTES) if self.is_cuda else self.memory_bytes

    @property
    def rounding_bytes(self) -> int:
        """The allocator rounds each allocation up to a multiple of this."""
        return CUDA_BLOCK_BYTES if self.is_cuda else 1

    @property
    def processors(self) -> Processors:
        """What runs the blocks of a kernel; threads by the CUDA programming guide's table of capabilities."""
        major, minor = self.compute_capability or (0, 0)
        threads = 1024 if (major, minor) == (7, 5) else 1536 if (major == 8 and minor) or major == 12 else 2048
        return Processors(self.multiprocessors, threads)

    @property
    def uses_foreach(self) -> bool:
        """Whether optimizers use operators on lists of tensors, unless told otherwise: on CUDA devices since 2.0."""
        return self.is_cuda and self.torch >= (2, 0)

    @property
    def keeps_gradients(self) -> bool:
        """Whether ``zero_grad()`` sets gradients to zero, not to None, so that they stay: before 2.0."""
        return self.torch < (2, 0)

    @property
    def keeps_softmax_inputs(self) -> bool:
        """Whether softmax and log-softmax save their input beside their output: before 1.11."""
        return self.torch < (1, 11)

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
        table.processors or _USUAL_PROCESSORS,
    )


_PROFILES = {"cpu": DeviceProfile("cpu", memory_bytes(), None)} | {
    name: _profile(name, table) for name, table in shipped().items()
}

DEFAULT = DEFAULT_DEVICE


def profiles() -> list[DeviceProfile]:
    """Return all profiles."""
    return list(_PROFILES.values())


def profile_names() -> list[str]:
    """Return the names of all profiles."""
    return list(_PROFILES)


def get(name: str) -> DeviceProfile:
    """Return the profile of a name, or of a ``.toml`` file; a UsageError if there is none, or it cannot be used."""
    if name.endswith(".toml"):
        return _profile(name, read_device_table(Path(name)))
    return _PROFILES[device_named(name)]


def of_case(case: Case) -> DeviceProfile:
    """Return the device of a simulated case, with the torch that the case names.

    Raises:
        UsageError: There is no such profile, or it cannot be used; or an older torch is to run on the CPU.
    """
    profile = get(case.device_profile or DEFAULT)
    if case.torch_era and not profile.is_cuda:
        raise UsageError(
            f"--torch-era {case.torch_era}: what older torch does is known of CUDA cards, and {profile.name} is none: "
            "name a card with --device-profile"
        )
    version = version_of(case.torch_era) if case.torch_era else INSTALLED_TORCH
    return replace(profile, torch=version, workspaces=case.workspaces)
