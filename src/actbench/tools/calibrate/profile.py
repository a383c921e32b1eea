"""From timed operators to a device profile, as a value, as TOML and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pandas

from actbench.report.tables import Table, fill
from actbench.report.tables.values import Column
from actbench.simulator.cost.rates import PRECISIONS, published
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.stopwatch import Sample
from actbench.units import format_seconds

_WIDTH = 3.0
"""Sizes whose base-2 logarithms fall into one bin of this width become one point."""
_SUSTAINED = 2**18
"""Operators that move fewer bytes say nothing about the bandwidth."""
_FILLING = 4
"""The rate of an operator counts only if it takes this many times the seconds of the smallest kernel."""
_HIGHEST, _LEAST = 1.5, 0.001
"""Largest and smallest share in a profile."""
_KILO, _MEGA, _MICRO = 1e3, 1e6, 1e-6
_OPERATOR = ["label", "precision"]


def points_of(samples: Iterable[Sample]) -> pandas.DataFrame:
    """Return the points of each operator (``label``, ``precision``), by size.

    An operator with floating-point operations has a point for each shape, with the median time. Others have one for
    sizes that are about the same, with their median rate; of these, a larger one takes no less.

    Returns:
        Columns: the operator and its ``kind``; ``flops``, ``moved`` (bytes) and ``taken`` (microseconds); and ``rate``,
        in operations or else bytes a microsecond.
    """
    works = [(each.work, each.seconds / _MICRO) for each in samples if each.work.kind is not None]
    rows = [(work.label, work.precision, work.kind, work.flops, max(work.moved, 1), taken) for work, taken in works]
    frame = pandas.DataFrame(rows, columns=[*_OPERATOR, "kind", "flops", "moved", "taken"])
    frame = frame.astype(dict.fromkeys(("flops", "moved", "taken"), float))
    operators = frame.groupby(_OPERATOR)
    frame["kind"] = operators.kind.transform("first")
    frame = frame[(frame.flops > 0) | (operators.flops.transform("max") == 0)]
    shapes = frame.groupby([*_OPERATOR, "kind", "moved", "flops"], as_index=False).taken.median()
    shapes["size"] = shapes.moved.where(shapes.flops > 0, np.floor(np.log2(shapes.moved) / _WIDTH))
    shapes["log"], shapes["slow"] = np.log(shapes.moved), shapes.taken / shapes.moved
    grouped = shapes.groupby([*_OPERATOR, "kind", "size", "flops"], as_index=False)
    points: pandas.DataFrame = grouped.agg({"log": "mean", "slow": "median"})
    points["moved"] = np.exp(points.log).round()
    points["taken"] = points.slow * points.moved
    points["taken"] = points.taken.where(points.flops > 0, points.groupby(_OPERATOR).taken.cummax())
    points["rate"] = points.flops.where(points.flops > 0, points.moved) / points.taken
    return points


def peaks(points: pandas.DataFrame) -> dict[str, float]:
    """Return the TFLOP/s of the best matrix product, by precision."""
    products = points[(points.kind == "matmul") & (points.flops > 0)]
    best = products.groupby("precision").rate.max() / _MEGA
    return {name: best[name] for name in PRECISIONS if name in best}


def shares(
    points: pandas.DataFrame, flops: Mapping[str, float], bandwidth: float, launch: float, *, on_cuda: bool
) -> dict[str, dict[str, float]]:
    """Return the efficiencies of a profile, which serve for operators that were not measured.

    Args:
        points: What was measured.
        flops: TFLOP/s by precision.
        bandwidth: GB/s.
        launch: Microseconds of the smallest kernel.
        on_cuda: Whether small operators all take as long as nothing.
    """
    enough = max(_SUSTAINED, _FILLING * launch * bandwidth * _KILO * on_cuda)
    tables = {}
    for kind in sorted(set(points.kind)):
        members = points[points.kind == kind]
        operators = members.groupby(_OPERATOR)
        best = members[members.flops > 0].groupby("precision").rate.max()
        table = {name: best[name] / (flops.get(name, flops["fp32"]) * _MEGA) for name in best.index}
        if table:
            memory = 1.0
        else:
            largest = operators.last()
            large = largest.rate[largest.moved >= enough]
            rates = large if len(large) or on_cuda else largest.rate
            memory = rates.median() / (bandwidth * _KILO) if len(rates) else published().kinds[kind].memory
        table = {name: min(max(share, _LEAST), _HIGHEST) for name, share in {**table, "memory": memory}.items()}
        tables[kind] = {**table, "ramp": max(operators.taken.first().median() - launch, 0.0)}
    return tables


def operators_of(points: pandas.DataFrame) -> dict[str, dict[str, list[list[float]]]]:
    """Return the points of a profile's operators, by label and precision."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    groups: Iterable[Any] = points.groupby(_OPERATOR)
    for (label, precision), each in groups:
        columns = ["flops", "moved", "taken"] if each.flops.any() else ["moved", "taken"]
        found.setdefault(label, {})[precision] = each[columns].to_numpy().tolist()
    return found


_COLUMNS: tuple[Column[Mapping[str, Any]], ...] = (
    Column("kind", "Kind", "text", itemgetter("kind")),
    Column("precision", "Type", "text", itemgetter("precision")),
    Column("giga_per_second", "GFLOP/s or GB/s", "rate", itemgetter("rate"), better="higher"),
    Column("share", "Share", "share", itemgetter("share"), better="higher"),
    Column("least_seconds", "Smallest", "seconds", itemgetter("least"), better="lower"),
)


def calibration_table(profile: DeviceTable, device: str, notes: Sequence[str]) -> Table:
    """Return one row for each kind of operator and type, of the profile of a calibration."""
    given = profile.model_dump(exclude_none=True)
    peaks: dict[str, float] = {name: given[name] * _KILO for name in PRECISIONS if name in given}
    peaks["bytes"] = given["bandwidth"]
    rows = []
    for kind, table in given["efficiencies"].items():
        reached: dict[str, float] = {name: table[name] for name in PRECISIONS if name in table}
        least = (given["launch"] + table["ramp"]) * _MICRO
        for name, share in (reached or {"bytes": table["memory"]}).items():
            rate = share * peaks.get(name, peaks["fp32"])
            rows.append({"kind": kind, "precision": name, "rate": rate, "share": share, "least": least})
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
    parts = {"": tables, "[host]": tables.pop("host", {})}
    for name in ("efficiencies", "operators"):
        parts |= {f'[{name}."{key}"]': table for key, table in tables.pop(name, {}).items()}
    lines = ["# Measured by 'actbench calibrate'; docs/time.md explains the figures. Use it with --device-profile."]
    for heading, table in parts.items():
        # strings, numbers and lists of JSON are those of TOML
        lines += [heading, *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"
