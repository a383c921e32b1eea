"""Device profiles in files: the shipped file, and the user's own files."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from actbench.errors import UsageError
from actbench.measuring.cost.rates import published
from actbench.results.records import Data
from actbench.validation import explain

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1.5)]


class KindTable(Data):
    """The shares of rates that one kind of operator reaches; see ``measuring/cost/efficiencies.toml``."""

    fp32: Share | None = None
    tf32: Share | None = None
    half: Share | None = None
    fp8: Share | None = None
    memory: Share
    ramp: Annotated[float, Field(ge=0)]


_TIMED = ("fp32", "bandwidth", "link", "launch", "peer", "network", "devices")
"""What says something of times alone."""

Point = tuple[Positive, Positive] | tuple[Positive, Positive, Positive]


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

    forward: Positive
    backward: Positive
    optimizer: Positive | None = None  # None: as forward
    view: Positive
    packing: Positive
    listed: Positive
    bandwidth: Positive


class DeviceTable(Data):
    """A device; see ``measuring/meters/devices.toml``. A file of one device may have its own efficiencies."""

    gib: Positive
    compute_capability: tuple[int, int] | None = None
    fp32: Positive | None = None
    tf32: Positive | None = None
    half: Positive | None = None
    fp8: Positive | None = None
    bandwidth: Positive | None = None
    link: Positive | None = None
    launch: Annotated[float, Field(ge=0)] | None = None
    peer: Positive | None = None  # that of link
    devices: Annotated[int, Field(gt=0)] = 8
    network: Positive = 12.5
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
    text = resources.files("actbench.measuring.meters").joinpath("devices.toml").read_text(encoding="utf-8")
    return {name: DeviceTable.model_validate(table) for name, table in tomllib.loads(text).items()}


def read(path: Path) -> DeviceTable:
    """Return the device of a user's file.

    Raises:
        UsageError: The file cannot be read, or describes no possible device.
    """
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        table = DeviceTable.model_validate(found)
    except OSError as error:
        raise UsageError(f"--device-profile {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--device-profile {str(path)!r} is no TOML: {error}") from None
    except ValidationError as error:
        lines = explain(
            error, found, {"": DeviceTable, "host": HostTable, "efficiencies": KindTable, "operators": OperatorTable}
        )
        raise UsageError(f"--device-profile {str(path)!r}: {'; '.join(lines)}") from None
    unknown = set(table.efficiencies or {}) - published().kinds.keys()
    if unknown:
        raise UsageError(
            f"--device-profile {str(path)!r}: there is no kind of operator {', '.join(sorted(unknown))}; known: "
            f"{', '.join(published().kinds)}"
        )
    if (table.efficiencies or table.operators) and table.host is None:
        raise UsageError(
            f"--device-profile {str(path)!r}: efficiencies and operators need the table [host] beside them"
        )
    some = [name for name in _TIMED if name in table.model_fields_set]
    if some and not table.has_rates:
        raise UsageError(
            f"--device-profile {str(path)!r}: fp32, bandwidth, link and launch belong together; it has "
            f"{', '.join(some)}"
        )
    return table
