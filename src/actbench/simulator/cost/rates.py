"""What a device can do in a second, and what share of it operators reach: figures from files."""

from __future__ import annotations

import functools
import math
import tomllib
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from actbench.simulator.cost.links import Links, LinkShares

Precision = Literal["fp32", "tf32", "half", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "half", "fp8")

BFLOAT16_FROM = (8, 0)
"""Compute capability from which on CUDA devices have units for bfloat16, those of Ampere."""

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device.

    Attributes:
        flops: Floating-point operations a second by precision.
        bandwidth: Bytes a second of the device's memory.
        link: Bytes a second between it and host memory, in one direction.
        launch: Seconds of a kernel that does nothing.
        links: The links to other devices.
        source: Who publishes these rates.
        has_bfloat16: Whether it has units for bfloat16; without them cuBLAS computes in float32.
    """

    flops: Mapping[Precision, float]
    bandwidth: float
    link: float
    launch: float
    links: Links
    source: str
    has_bfloat16: bool = True

    def of(self, precision: Precision) -> float:
        """Return the operations a second of a precision; those of float32 if the device has no units for it."""
        return self.flops.get(precision) or self.flops["fp32"]


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak rates that one kind of operator reaches, and the seconds in which it fills the device."""

    flops: Mapping[Precision, float]
    memory: float
    ramp: float


@dataclass(frozen=True)
class Curve:
    """What an operator that moves bytes took when it was measured.

    Attributes:
        sizes: Bytes moved; they grow.
        seconds: Of each size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, flops: float, size: float, least: float = 0.0, rate: float = 0.0) -> float:
        """Return the seconds of any size: on a line between logarithms.

        Beyond the largest measured size, further bytes take the rate of that size, or ``rate`` in bytes a second if
        that is faster. Below the smallest, the rate of that size holds, but nothing takes less than ``least`` seconds.
        """
        place = bisect(self.sizes, size)
        if place == 0:
            return min(self.seconds[0], max(self.seconds[0] * size / self.sizes[0], least))
        if place == len(self.sizes):
            more = size - self.sizes[-1]
            return self.seconds[-1] + more / max(self.sizes[-1] / self.seconds[-1], rate)
        (low, high), (fast, slow) = self.sizes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return float(fast * (slow / fast) ** (math.log(size / low) / math.log(high / low)))


@dataclass(frozen=True)
class Surface:
    """What an operator with floating-point operations took when it was measured, in several shapes.

    Attributes:
        shapes: Operations and bytes moved.
        seconds: Of each shape.
    """

    shapes: tuple[tuple[float, float], ...]
    seconds: tuple[float, ...]

    def at(self, flops: float, size: float, least: float = 0.0, rate: float = 0.0) -> float:
        """Return the seconds of any shape, at the mean rate of the measured shapes, of which near ones count more.

        No shape takes less than the shortest measured time, or than ``least`` seconds if that is less. An operator
        without floating-point operations, such as the gradient of a bias alone, only moves its bytes: at ``rate`` bytes
        a second, if that is known.
        """
        shortest = min(least, *self.seconds)
        if not flops:
            return max(size / rate if rate else 0.0, shortest)
        weights = [self._nearness(flops, size, *shape) for shape in self.shapes]
        rates = [math.log(shape[0] / taken) for shape, taken in zip(self.shapes, self.seconds, strict=True)]
        mean = sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / sum(weights)
        return max(flops / math.exp(mean), shortest)

    @staticmethod
    def _nearness(flops: float, size: float, known_flops: float, known_size: float) -> float:
        distance = math.log(flops / known_flops) ** 2 + math.log(size / known_size) ** 2
        # Shepard's weights (1968), by the fourth power of the distance
        return 1 / (distance + _NEAREST) ** 2


_NEAREST = 1e-3
"""Below this squared distance of logarithms shapes are the same."""


@dataclass(frozen=True)
class Host:
    """Seconds of the host for an operator in eager mode, and bytes a second of its memory."""

    forward: float
    backward: float
    optimizer: float
    view: float
    packing: float
    listed: float
    bandwidth: float


@dataclass(frozen=True)
class Efficiencies:
    """What operators reach, by kind, and what the host needs to issue them.

    Attributes:
        links: What collectives reach of the links between devices.
        overlap: By which power operations and bytes of an operator add up; the larger, the better they overlap.
        operators: What single operators took on the device itself, by label and precision: it goes before their kind.
    """

    kinds: Mapping[str, Efficiency]
    host: Host
    links: LinkShares
    overlap: float
    operators: Mapping[tuple[str, str], Curve | Surface] = field(default_factory=dict)


def rates(table: Mapping[str, Any]) -> Rates:
    """Return the rates that a table of a device names in TFLOP/s, GB/s and microseconds."""
    flops = {name: table[name] * _TERA * table.get("sustained", 1.0) for name in PRECISIONS if table.get(name)}
    link = table["link"]
    # devices without links of their own send over the bus to the host
    links = Links((table.get("peer") or link) * _GIGA, table["network"] * _GIGA, table["devices"])
    capability = table.get("compute_capability")
    return Rates(
        flops,
        table["bandwidth"] * _GIGA,
        link * _GIGA,
        table["launch"] * _MICRO,
        links,
        table.get("source", ""),
        has_bfloat16=capability is None or tuple(capability) >= BFLOAT16_FROM,
    )


def efficiencies(
    kinds: Mapping[str, Mapping[str, Any]],
    host: Mapping[str, float],
    links: LinkShares,
    overlap: float,
    *,
    beside: Mapping[str, Efficiency] | None = None,
    operators: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] | None = None,
) -> Efficiencies:
    """Return what tables of kinds of operators and of the host say; ``beside`` has the kinds that they leave out.

    ``operators`` are points of single ones, by precision: bytes and microseconds, with the operations in front where
    there are some.
    """
    found = {
        kind: Efficiency(
            {name: table[name] for name in PRECISIONS if table.get(name)}, table["memory"], table["ramp"] * _MICRO
        )
        for kind, table in kinds.items()
    }
    given = {**host, "optimizer": host.get("optimizer") or host["forward"]}
    seconds = {name: value * _MICRO for name, value in given.items() if name != "bandwidth"}
    curves = {
        (name, precision): _measured(points)
        for name, table in (operators or {}).items()
        for precision, points in table.items()
    }
    return Efficiencies(
        {**(beside or {}), **found}, Host(**seconds, bandwidth=host["bandwidth"] * _GIGA), links, overlap, curves
    )


def _measured(points: Sequence[Sequence[float]]) -> Curve | Surface:
    seconds = tuple(_MICRO * point[-1] for point in points)
    if len(points[0]) == 2:
        return Curve(tuple(point[0] for point in points), seconds)
    return Surface(tuple((point[0], point[1]) for point in points), seconds)


@functools.cache
def published() -> Efficiencies:
    """Return the efficiencies that were fitted to published figures, for CUDA devices."""
    text = resources.files(__package__).joinpath("efficiencies.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    host, overlap, links = tables.pop("host"), tables.pop("overlap"), tables.pop("links")
    hops = {name: value * _MICRO for name, value in links.items() if name != "bandwidth"}
    return efficiencies(tables, host, LinkShares(bandwidth=links["bandwidth"], **hops), overlap)
