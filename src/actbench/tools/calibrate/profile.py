"""From timed operators to a device profile, its file and its table."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from actbench.report.tables import Table, fill
from actbench.report.tables.values import Column
from actbench.simulator.cost.rates import PRECISIONS, Precision, published
from actbench.simulator.cost.work import OperatorWork
from actbench.simulator.profiles import DeviceTable
from actbench.units import format_seconds

_BIN_WIDTH = 3.0
"""Sizes whose base-2 logarithms fall into one bin of this width become one point."""
_SUSTAINED_BYTES = 2**18
"""Operators that move fewer bytes do not reach the bandwidth."""
_FILLING = 4
"""The rate of an operator counts only if it takes this many times the seconds of the smallest kernel."""
_TERA, _GIGA, _KILO, _MICRO = 1e12, 1e9, 1e3, 1e-6
_MIN_SHARE, _MAX_SHARE = 0.001, 1.5

Key = tuple[str, Precision]
"""The label of an operator and a precision."""
Point = tuple[float, float, float]
"""Operations, bytes and seconds."""


class Sample(NamedTuple):
    """One timed operator: its work and its seconds."""

    work: OperatorWork
    seconds: float


class Found(NamedTuple):
    """A measured operator, with points in the order of their bytes."""

    kind: str
    points: tuple[Point, ...]

    @property
    def rates(self) -> list[float]:
        """Operations a second at each point, or bytes a second without operations."""
        return [(flops or size) / seconds for flops, size, seconds in self.points]


def found_in(samples: Iterable[Sample]) -> dict[Key, Found]:
    """Return each operator's seconds by size; runs of about the same size count with their median rate."""
    shapes: dict[tuple[Key, str], dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for work, seconds in samples:
        shapes[(work.label, work.precision), work.kind or ""][max(work.moved, 1), work.flops].append(seconds)
    found = {}
    for (key, kind), taken in shapes.items():
        points = [(flops, size, median(seconds)) for (size, flops), seconds in sorted(taken.items())]
        found[key] = Found(kind, tuple(point for point in points if point[0]) or _curve(points))
    return found


def _curve(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return one point for sizes that are about the same, at their median rate; larger sizes take no less time."""
    bins: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        bins[math.floor(math.log2(point[1]) / _BIN_WIDTH)].append(point)
    found: list[Point] = []
    for _, near in sorted(bins.items()):
        size = geometric_mean(size for _, size, _ in near)
        seconds = median(taken / size for _, size, taken in near) * size
        found.append((0.0, size, max([seconds, *(each[2] for each in found)])))
    return tuple(found)


def peaks(found: Mapping[Key, Found]) -> dict[Precision, float]:
    """Return the operations a second of the best matrix product, by precision."""
    rates: dict[Precision, list[float]] = defaultdict(list)
    for (_, precision), each in found.items():
        if each.kind == "matmul":
            rates[precision] += each.rates
    return {name: max(rates[name]) for name in PRECISIONS if rates[name]}


def shares_of_kinds(found: Mapping[Key, Found], bandwidth: float, launch: float = 0.0) -> dict[str, dict[str, float]]:
    """Return what each kind of operator reaches of the peak rates and of ``bandwidth``, and its ramp in microseconds.

    An operator that takes hardly longer than ``launch``, the seconds of the smallest kernel of a GPU, says nothing of
    its rate; a kind with no other has the share of published figures.
    """
    grouped: dict[tuple[str, Precision], list[Found]] = defaultdict(list)
    for (_, precision), each in found.items():
        grouped[each.kind, precision].append(each)
    flops, filling = peaks(found), _FILLING * launch * bandwidth
    kinds: dict[str, dict[str, float]] = {}
    for (kind, precision), members in sorted(grouped.items()):
        least = median(each.points[0][2] for each in members)
        ramp = _rounded(max(least - launch, 0.0) / _MICRO)
        table = kinds.setdefault(kind, {"memory": 1.0, "ramp": ramp})
        computing = [max(each.rates) for each in members if each.points[0][0]]
        if computing:
            table[precision] = _share(max(computing) / flops.get(precision, flops["fp32"]))
            continue
        last = [(each.points[-1][1], each.rates[-1]) for each in members]
        large = [rate for size, rate in last if size >= max(_SUSTAINED_BYTES, filling)]
        small = [bandwidth * published().kinds[kind].memory] if filling > _SUSTAINED_BYTES else [r for _, r in last]
        table["memory"] = _share(median(large or small) / bandwidth)
    return kinds


def profile_of(found: Mapping[Key, Found], host: Mapping[str, float], **device: Any) -> DeviceTable:
    """Return the device profile of measured operators.

    Args:
        found: The operators, among them copies and matrix products.
        host: Seconds that the host needs for one operator, by part of the step and kind.
        device: Fields of the profile that are not measured.
    """
    copied = max(found["copy_", "fp32"].rates)
    launch = median(each.points[0][2] for each in found.values() if each.kind == "elementwise")
    operators: dict[str, dict[str, Any]] = {}
    for (label, precision), each in sorted(found.items()):
        operators.setdefault(label, {})[precision] = [
            (*([round(flops)] if flops else []), round(size), _rounded(seconds / _MICRO))
            for flops, size, seconds in each.points
        ]
    bandwidth = _rounded(copied / _GIGA)
    measured: dict[str, Any] = {
        **{name: _rounded(rate / _TERA) for name, rate in peaks(found).items()},
        "bandwidth": bandwidth,
        # a copy counts bytes twice, as read and as written
        "link": _rounded(max(found["to_host", "fp32"].rates) / 2 / _GIGA),
        "launch": _rounded(launch / _MICRO),
        "host": {**{name: _rounded(seconds / _MICRO) for name, seconds in host.items()}, "bandwidth": bandwidth},
        "efficiencies": shares_of_kinds(found, copied, launch if device.get("compute_capability") else 0.0),
        "operators": operators,
    }
    return DeviceTable.model_validate({**device, **measured})


def _share(value: float) -> float:
    return _rounded(min(max(value, _MIN_SHARE), _MAX_SHARE))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def toml(profile: DeviceTable) -> str:
    """Return the text of a profile's file."""
    fields = profile.model_dump(exclude_none=True)
    kinds, operators = fields.pop("efficiencies", {}), fields.pop("operators", {})
    tables = {
        "host": fields.pop("host", {}),
        **{f"efficiencies.{json.dumps(name)}": table for name, table in kinds.items()},
        **{f"operators.{json.dumps(name)}": table for name, table in operators.items()},
    }
    lines = [
        "# Measured by 'actbench calibrate'; docs/time.md explains the figures. Use it with --device-profile.",
        "# host: microseconds for an operator, and GB/s of its memory. efficiencies: shares of the rates that kinds of",
        "# operators reach, for those without an entry of their own. operators: bytes and microseconds, after the",
        "# number of operations if there are any.",
        *_entries(fields),
    ]
    for name, table in tables.items():
        lines += [f"\n[{name}]", *_entries(table)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> list[str]:
    # text, numbers and lists are written in TOML as in JSON
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]


def calibration_table(profile: DeviceTable, notes: Sequence[str]) -> Table:
    """Return one row for each kind of operator and type."""
    host = profile.host.model_dump() if profile.host else {}
    needed = ", ".join(f"{format_seconds(host[name] * _MICRO)} for {what}" for name, what in _HOST.items() if host)
    rates = (
        f"memory {profile.bandwidth:.3g} GB/s, link to host memory {profile.link:.3g} GB/s, the smallest operators "
        f"{format_seconds((profile.launch or 0.0) * _MICRO)}"
    )
    share = "Share: of the rate of the best matrix product, or of the bandwidth; more than 100 % where caches help."
    said = (f"{profile.source}: {rates}.", f"The host needs, in addition to what operators take: {needed}.", share)
    return fill("What this device reaches", _COLUMNS, _reached(profile), (*said, *notes))


def _reached(profile: DeviceTable) -> tuple[_Reached, ...]:
    """Return kind, type, share and rate in GFLOP/s or GB/s."""
    rows: list[_Reached] = []
    for kind, table in (profile.efficiencies or {}).items():
        shares = {name: share for name in PRECISIONS if (share := getattr(table, name))}
        rows += [(kind, name, share, _KILO * share * _peak(profile, name)) for name, share in shares.items()]
        if not shares:
            rows.append((kind, "bytes", table.memory, table.memory * (profile.bandwidth or 0.0)))
    return tuple(rows)


def _peak(profile: DeviceTable, precision: Precision) -> float:
    return float(getattr(profile, precision) or profile.fp32 or 0.0)


_Reached = tuple[str, str, float, float]
_HOST = {
    "forward": "an operator of the forward pass",
    "backward": "one of the backward pass",
    "optimizer": "one of the optimizer",
    "packing": "one that packs",
    "view": "a view",
}
_COLUMNS: tuple[Column[_Reached], ...] = (
    Column("kind", "Kind", "text", lambda row: row[0]),
    Column("precision", "Type", "text", lambda row: row[1]),
    Column("giga_per_second", "GFLOP/s or GB/s", "rate", lambda row: row[3], better="higher"),
    Column("share", "Share", "share", lambda row: row[2], better="higher"),
)
