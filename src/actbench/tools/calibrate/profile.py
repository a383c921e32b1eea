"""From timed operators to a device profile, as a value, as TOML and as a table."""

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
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.stopwatch import Sample
from actbench.units import format_seconds

Key = tuple[str, Precision]
"""The label of an operator and a precision."""
Point = tuple[float, ...]
"""As in a profile: bytes and microseconds, after the number of operations where these are counted."""

_WIDTH = 3.0
"""Sizes whose base-2 logarithms fall into one bin of this width become one point."""
_SUSTAINED = 2**18
"""Operators that move fewer bytes say nothing about the bandwidth."""
_FILLING = 4
"""The rate of an operator counts only if it takes this many times the seconds of the smallest kernel."""
_HIGHEST, _LEAST = 1.5, 0.001
"""Largest and smallest share in a profile."""
_KILO, _MEGA, _MICRO = 1e3, 1e6, 1e-6


class Found(NamedTuple):
    """A measured operator, with points in the order of their bytes."""

    kind: str
    points: tuple[Point, ...]

    @property
    def has_flops(self) -> bool:
        """Whether its floating-point operations are counted."""
        return len(self.points[0]) > 2

    @property
    def rates(self) -> list[float]:
        """Operations in a microsecond at each point, or bytes without operations."""
        return [point[0] / point[-1] for point in self.points]


def rounded(value: float, digits: int = 4) -> float:
    """Return a number with so many digits that count."""
    return float(f"{value:.{digits}g}")


def found_in(samples: Iterable[Sample]) -> dict[Key, Found]:
    """Return each operator's microseconds by size; runs of about the same size count with their median rate."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.work.label, sample.work.precision].append(sample)
    return {key: Found(each[0].work.kind or "", _points(each)) for key, each in sorted(grouped.items())}


def _points(samples: Sequence[Sample]) -> tuple[Point, ...]:
    """Return a point for each shape with operations, otherwise one for sizes that are about the same."""
    shapes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for work, seconds in samples:
        shapes[max(work.moved, 1), work.flops].append(seconds / _MICRO)
    sizes = [(size, flops, median(taken)) for (size, flops), taken in sorted(shapes.items())]
    counted = tuple((flops, size, rounded(taken)) for size, flops, taken in sizes if flops)
    if counted:
        return counted
    binned: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for size, _, taken in sizes:
        binned[math.floor(math.log2(size) / _WIDTH)].append((size, taken))
    found: list[Point] = []
    for members in binned.values():
        size = round(geometric_mean(size for size, _ in members))
        taken = median(taken / size for size, taken in members) * size
        found.append((size, rounded(max([taken, *(before for _, before in found)]))))  # a larger size takes no less
    return tuple(found)


def peaks(found: Mapping[Key, Found]) -> dict[str, float]:
    """Return the TFLOP/s of the best matrix product, by precision."""
    rates: dict[str, float] = defaultdict(float)
    for (_, precision), each in found.items():
        if each.kind == "matmul" and each.has_flops:
            rates[precision] = max(rates[precision], *each.rates)
    return {name: rounded(rates[name] / _MEGA) for name in PRECISIONS if name in rates}


def shares(
    found: Mapping[Key, Found], flops: Mapping[str, float], bandwidth: float, launch: float, *, on_cuda: bool
) -> dict[str, dict[str, float]]:
    """Return the efficiencies of a profile, which serve for operators that were not measured.

    Args:
        found: What was measured.
        flops: TFLOP/s by precision.
        bandwidth: GB/s.
        launch: Microseconds of the smallest kernel.
        on_cuda: Whether small operators all take as long as nothing.
    """
    kinds: dict[str, list[tuple[Precision, Found]]] = defaultdict(list)
    for (_, precision), each in found.items():
        kinds[each.kind].append((precision, each))
    enough = max(_SUSTAINED, _FILLING * launch * bandwidth * _KILO * on_cuda)
    tables = {}
    for kind, members in kinds.items():
        table = {"memory": 1.0}
        for precision, each in members:
            if each.has_flops:
                peak = flops.get(precision, flops["fp32"]) * _MEGA
                table[precision] = max(table.get(precision, 0.0), *(rate / peak for rate in each.rates))
        if len(table) == 1:
            large = [each.rates[-1] for _, each in members if each.points[-1][0] >= enough]
            small = (
                [published().kinds[kind].memory * bandwidth * _KILO]
                if on_cuda
                else [each.rates[-1] for _, each in members]
            )
            table["memory"] = median(large or small) / (bandwidth * _KILO)
        least = median(each.points[0][-1] for _, each in members)
        table = {name: rounded(min(max(share, _LEAST), _HIGHEST)) for name, share in table.items()}
        tables[kind] = {**table, "ramp": rounded(max(least - launch, 0.0))}
    return tables


class _Reached(NamedTuple):
    kind: str
    precision: str
    rate: float
    share: float
    least_seconds: float


_COLUMNS: tuple[Column[_Reached], ...] = (
    Column("kind", "Kind", "text", lambda reached: reached.kind),
    Column("precision", "Type", "text", lambda reached: reached.precision),
    Column("giga_per_second", "GFLOP/s or GB/s", "rate", lambda reached: reached.rate, better="higher"),
    Column("share", "Share", "share", lambda reached: reached.share, better="higher"),
    Column("least_seconds", "Smallest", "seconds", lambda reached: reached.least_seconds, "lower"),
)


def calibration_table(profile: DeviceTable, device: str, notes: Sequence[str]) -> Table:
    """Return one row for each kind of operator and type, of the profile of a calibration."""
    given = profile.model_dump(exclude_none=True)
    peaks: dict[str, float] = {name: given[name] * _KILO for name in PRECISIONS if name in given}
    peaks["bytes"] = given["bandwidth"]
    rows = []
    for kind, table in given["efficiencies"].items():
        reached: dict[str, float] = {name: table[name] for name in PRECISIONS if name in table}
        reached = reached or {"bytes": table["memory"]}
        for name, share in reached.items():
            least = (given["launch"] + table["ramp"]) * _MICRO
            rows.append(_Reached(kind, name, share * peaks.get(name, peaks["fp32"]), share, least))
    best = ", ".join(f"{name} {given[name]:.3g} TFLOP/s" for name in PRECISIONS if name in given)
    links = f"memory {given['bandwidth']:.3g} GB/s, link to host memory {given['link']:.3g} GB/s"
    parts = {"forward pass": "forward", "backward pass": "backward", "optimizer": "optimizer", "packing": "packing"}
    host = ", ".join(f"{format_seconds(given['host'][key] * _MICRO)} ({name})" for name, key in parts.items())
    all_notes = [
        f"{profile.source}.",
        f"Peak rates: {best}; {links}, the smallest operators {format_seconds(given['launch'] * _MICRO)}.",
        f"The host needs, for each operator and in addition to its time: {host}.",
        "Share: of the peak rate of the type, or of the bandwidth; more than 100 % where caches help.",
        *notes,
    ]
    return fill(f"What {device} reaches", _COLUMNS, rows, all_notes)


def toml(profile: DeviceTable) -> str:
    """Return the text of a profile's file."""
    tables = profile.model_dump(mode="json", exclude_none=True)
    parts = {"host": tables.pop("host", {})}
    for name in ("efficiencies", "operators"):
        parts |= {f'{name}."{key}"': table for key, table in tables.pop(name, {}).items()}
    lines = ["# Measured by 'actbench calibrate'; docs/time.md explains the figures. Use it with --device-profile."]
    lines += _entries(tables)
    for name, table in parts.items():
        lines += ["", f"[{name}]", *_entries(table)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> list[str]:
    # strings, numbers and lists of JSON are those of TOML
    return [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
