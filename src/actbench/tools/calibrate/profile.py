"""From timed operators to a device profile, as a value and as TOML."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch

from actbench.machine import memory_bytes
from actbench.simulator.cost.rates import PRECISIONS, Curve, Precision, Surface, published
from actbench.simulator.profiles import DeviceTable
from actbench.tools.calibrate.records import CalibrationReport, KindFound
from actbench.tools.calibrate.stopwatch import Sample
from actbench.units import GIB

Key = tuple[str, Precision]
"""The label of an operator and a precision."""

_WIDTH = 3.0
"""Sizes whose base-2 logarithms fall into one bin of this width become one point."""
_SUSTAINED = 2**18
"""Operators that move fewer bytes say nothing about the bandwidth."""
_FILLING = 4
"""The rate of an operator counts only if it takes this many times the seconds of the smallest kernel."""
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
_HIGHEST, _LEAST = 1.5, 0.001
"""Largest and smallest share in a profile."""

Point = tuple[float, float, float]
"""Operations, bytes and seconds."""


class Found(NamedTuple):
    """A measured operator, with points in the order of their bytes."""

    kind: str
    points: tuple[Point, ...]

    @property
    def has_flops(self) -> bool:
        """Whether its floating-point operations are counted."""
        return self.points[0][0] > 0

    @property
    def measured(self) -> Curve | Surface:
        """Its time at any size."""
        flops, sizes, seconds = zip(*self.points, strict=True)
        return Surface(tuple(zip(flops, sizes, strict=True)), seconds) if self.has_flops else Curve(sizes, seconds)

    @property
    def rates(self) -> list[float]:
        """Operations a second at each point, or bytes a second without operations."""
        return [(flops or size) / seconds for flops, size, seconds in self.points]


def found_in(samples: Iterable[Sample]) -> dict[Key, Found]:
    """Return each operator's seconds by size; runs of about the same size count with their median rate."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.work.label, sample.work.precision].append(sample)
    return {key: _found(each) for key, each in grouped.items()}


def _found(samples: Sequence[Sample]) -> Found:
    shapes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        shapes[sample.work.flops, max(sample.work.moved, 1)].append(sample.seconds)
    points = sorted(((flops, size, median(taken)) for (flops, size), taken in shapes.items()), key=lambda each: each[1])
    has_flops = any(flops for flops, *_ in points)
    return Found(samples[0].work.kind or "", tuple(each for each in points if each[0]) if has_flops else _curve(points))


def _curve(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return one point for sizes that are about the same, at their median rate; larger sizes take no less time."""
    binned: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        binned[math.floor(math.log2(point[1]) / _WIDTH)].append(point)
    found: list[Point] = []
    for place in sorted(binned):
        size = geometric_mean(size for _, size, _ in binned[place])
        seconds = median(taken / size for _, size, taken in binned[place]) * size
        found.append((0.0, size, max([seconds, *(each[2] for each in found)])))
    return tuple(found)


def peaks(found: Mapping[Key, Found]) -> dict[Precision, float]:
    """Return the operations a second of the best matrix product, by precision."""
    rates: dict[Precision, list[float]] = defaultdict(list)
    for (_, precision), each in found.items():
        if each.kind == "matmul" and each.has_flops:
            rates[precision] += each.rates
    return {name: max(rates[name]) for name in PRECISIONS if rates[name]}


def by_kind(
    found: Mapping[Key, Found], flops: Mapping[Precision, float], bandwidth: float, launch: float = 0.0
) -> tuple[KindFound, ...]:
    """Return the speed of the operators of each kind and precision; a kernel takes ``launch`` seconds at least."""
    grouped: dict[tuple[str, Precision], list[Found]] = defaultdict(list)
    for (_, precision), each in found.items():
        grouped[each.kind, precision].append(each)
    return tuple(_kind(*key, each, flops, bandwidth, launch) for key, each in sorted(grouped.items()))


def _kind(
    kind: str,
    precision: Precision,
    found: Sequence[Found],
    flops: Mapping[Precision, float],
    bandwidth: float,
    launch: float,
) -> KindFound:
    computing = max((max(each.rates) for each in found if each.has_flops), default=None)
    filling = _FILLING * launch * bandwidth
    last = [(each.points[-1][1], each.rates[-1]) for each in found if not each.has_flops]
    large = [rate for size, rate in last if size >= max(_SUSTAINED, filling)]
    if filling > _SUSTAINED:  # a GPU, where what moves less takes as long as nothing
        small = [bandwidth * published().kinds[kind].memory]
    else:
        small = [rate for _, rate in last] or [bandwidth]
    moving = median(large or small)
    peak = flops.get(precision, flops["fp32"])
    return KindFound(
        kind=kind,
        precision=precision,
        operators=len(found),
        flops_per_second=computing,
        bytes_per_second=None if computing else moving,
        share=computing / peak if computing else moving / bandwidth,
        least_seconds=median(each.points[0][2] for each in found),
    )


def profile_of(report: CalibrationReport, found: Mapping[Key, Found], device: torch.device) -> DeviceTable:
    """Return the device profile of a calibration."""
    is_cuda, versions = device.type == "cuda", report.versions
    operators: dict[str, dict[str, Any]] = {}
    for (label, precision), each in sorted(found.items()):
        operators.setdefault(label, {})[precision] = [
            (*([round(flops)] if flops else []), round(size), _rounded(seconds / _MICRO))
            for flops, size, seconds in each.points
        ]
    return DeviceTable.model_validate(
        {
            "gib": _rounded((torch.cuda.mem_get_info(device)[1] if is_cuda else memory_bytes()) / GIB, 6),
            "compute_capability": torch.cuda.get_device_capability(device) if is_cuda else None,
            "processors": torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else None,
            **{name: _rounded(rate / _TERA) for name, rate in report.flops_per_second.items()},
            "bandwidth": _rounded(report.bandwidth / _GIGA),
            "link": _rounded(report.link / _GIGA),
            "launch": _rounded(report.launch_seconds / _MICRO),
            "source": f"actbench calibrate: {report.device}, {report.threads} threads of {report.machine.name}, "
            f"{report.machine.system}, actbench {versions.actbench}, torch {versions.torch}, "
            f"Python {versions.python}, {report.recorded_at}",
            "host": {
                **{name: _rounded(seconds / _MICRO) for name, seconds in report.host.model_dump().items()},
                "bandwidth": _rounded(report.bandwidth / _GIGA),
            },
            "efficiencies": _kinds(report),
            "operators": operators,
        }
    )


def _kinds(report: CalibrationReport) -> dict[str, dict[str, float]]:
    """Return the shares of kinds, which serve for operators that were not measured."""
    tables: dict[str, dict[str, float]] = {}
    for kind in report.kinds:
        ramp = _rounded(max(kind.least_seconds - report.launch_seconds, 0.0) / _MICRO)
        table = tables.setdefault(kind.kind, {"memory": 1.0, "ramp": ramp})
        what = "memory" if kind.flops_per_second is None else kind.precision
        table[what] = _rounded(min(max(kind.share, _LEAST), _HIGHEST))
    return tables


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def toml(profile: DeviceTable) -> str:
    """Return the text of a profile's file."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: DeviceTable) -> Iterator[str]:
    tables = profile.model_dump(exclude_none=True)
    host, kinds, operators = (tables.pop(name, {}) for name in ("host", "efficiencies", "operators"))
    yield "# Measured by 'actbench calibrate'; docs/time.md explains the figures. Use it with --device-profile."
    yield from _entries(tables)
    yield "\n# Microseconds of the host for an operator, and GB/s of its memory.\n[host]"
    yield from _entries(host)
    yield "\n# Shares of these rates that kinds of operators reach, for those that have no entry below."
    for name, table in kinds.items():
        yield f'\n[efficiencies."{name}"]'
        yield from _entries(table)
    yield "\n# Times of operators: moved bytes and microseconds, after the number of operations if there are any."
    for name, table in operators.items():
        yield f'\n[operators."{name}"]'
        yield from _entries(table)


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            yield f'{name} = "{escaped}"'
        elif isinstance(value, list | tuple):
            yield f"{name} = [{', '.join(_element(each) for each in value)}]"
        else:
            yield f"{name} = {_number(value)}"


def _element(value: Any) -> str:
    return f"[{', '.join(map(_number, value))}]" if isinstance(value, list | tuple) else _number(value)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 and value != int(value) else str(int(value) if value == int(value) else value)
