"""From timed operators to what a device profile says of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import geometric_mean, median
from typing import NamedTuple

from actbench.measuring.calibration.stopwatch import Sample
from actbench.measuring.cost.rates import PRECISIONS, Curve, Precision
from actbench.results.calibration import KindFound

Key = tuple[str, Precision]
"""The label of an operator and a precision."""

_WIDTH = 3.0
"""Of the logarithm, to base 2, of sizes that become one point."""
_SUSTAINED = 2**18
"""Bytes from which on an operator says something of the bandwidth."""


class Found(NamedTuple):
    """An operator that was measured."""

    kind: str
    has_flops: bool
    curve: Curve

    @property
    def rate(self) -> float:
        """Operations or bytes a second at the largest size."""
        return self.curve.sizes[-1] / self.curve.seconds[-1]

    @property
    def best_rate(self) -> float:
        """The highest of all sizes."""
        return max(size / seconds for size, seconds in zip(self.curve.sizes, self.curve.seconds, strict=True))


def found_in(samples: Iterable[Sample]) -> dict[Key, Found]:
    """Return each operator's seconds by its size: the median rate of those of about the same size."""
    grouped: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.work.label, sample.work.precision].append(sample)
    return {key: _found(each) for key, each in grouped.items()}


def _found(samples: Sequence[Sample]) -> Found:
    binned: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        binned[math.floor(math.log2(sample.size) / _WIDTH)].append(sample)
    points = [_point(binned[place]) for place in sorted(binned)]
    growing = points[:1] + [after for before, after in pairwise(points) if after[0] > before[0]]
    seconds = [max(taken for _, taken in growing[: place + 1]) for place in range(len(growing))]
    work = samples[0].work
    return Found(work.kind or "", work.flops > 0, Curve(tuple(size for size, _ in growing), tuple(seconds)))


def _point(samples: Sequence[Sample]) -> tuple[float, float]:
    size = geometric_mean(sample.size for sample in samples)
    return size, median(sample.seconds / sample.size for sample in samples) * size


def peaks(found: Mapping[Key, Found]) -> dict[Precision, float]:
    """Return the operations a second of the best product of matrices, by precision."""
    rates = {
        name: max(
            (each.best_rate for (_, which), each in found.items() if which == name and _is_product(each)), default=0
        )
        for name in PRECISIONS
    }
    return {name: rate for name, rate in rates.items() if rate}


def _is_product(found: Found) -> bool:
    return found.kind == "matmul" and found.has_flops


def by_kind(found: Mapping[Key, Found], flops: Mapping[Precision, float], bandwidth: float) -> tuple[KindFound, ...]:
    """Return what the operators of each kind and precision reached."""
    grouped: dict[tuple[str, Precision], list[Found]] = defaultdict(list)
    for (_, precision), each in found.items():
        grouped[each.kind, precision].append(each)
    return tuple(_kind(*key, each, flops, bandwidth) for key, each in sorted(grouped.items()))


def _kind(
    kind: str, precision: Precision, found: Sequence[Found], flops: Mapping[Precision, float], bandwidth: float
) -> KindFound:
    computing = max((each.best_rate for each in found if each.has_flops), default=None)
    large = [each.rate for each in found if not each.has_flops and each.curve.sizes[-1] >= _SUSTAINED]
    moving = median(large or [each.rate for each in found if not each.has_flops] or [bandwidth])
    peak = flops.get(precision, flops["fp32"])
    return KindFound(
        kind=kind,
        precision=precision,
        operators=len(found),
        flops_per_second=computing,
        bytes_per_second=None if computing else moving,
        share=computing / peak if computing else moving / bandwidth,
        least_seconds=median(each.curve.seconds[0] for each in found),
    )
