"""From timed operators to the figures of a device profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import NamedTuple

from actbench.measuring.calibration.stopwatch import Sample
from actbench.measuring.cost.rates import PRECISIONS, Curve, Precision, Surface
from actbench.results.calibration import KindFound

Key = tuple[str, Precision]
"""The label of an operator and a precision."""

_WIDTH = 3.0
"""Sizes whose base-2 logarithms fall into one bin of this width become one point."""
_SUSTAINED = 2**18
"""Operators that move fewer bytes say nothing about the bandwidth."""


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
    rates = {
        name: max(
            (max(each.rates) for (_, which), each in found.items() if which == name and _is_product(each)), default=0
        )
        for name in PRECISIONS
    }
    return {name: rate for name, rate in rates.items() if rate}


def _is_product(found: Found) -> bool:
    return found.kind == "matmul" and found.has_flops


def by_kind(found: Mapping[Key, Found], flops: Mapping[Precision, float], bandwidth: float) -> tuple[KindFound, ...]:
    """Return the speed of the operators of each kind and precision."""
    grouped: dict[tuple[str, Precision], list[Found]] = defaultdict(list)
    for (_, precision), each in found.items():
        grouped[each.kind, precision].append(each)
    return tuple(_kind(*key, each, flops, bandwidth) for key, each in sorted(grouped.items()))


def _kind(
    kind: str, precision: Precision, found: Sequence[Found], flops: Mapping[Precision, float], bandwidth: float
) -> KindFound:
    computing = max((max(each.rates) for each in found if each.has_flops), default=None)
    large = [each.rates[-1] for each in found if not each.has_flops and each.points[-1][1] >= _SUSTAINED]
    moving = median(large or [each.rates[-1] for each in found if not each.has_flops] or [bandwidth])
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
