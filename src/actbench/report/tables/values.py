"""Columns and values of tables: how a value is written, times and ratios with spreads, rows, and curves of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from actbench.units import format_bytes, format_seconds

Value = str | int | float | bool | None
Unit = Literal[
    "text", "bytes", "seconds", "share", "change", "ratio", "reduction", "rate", "count", "number", "difference", "flag"
]

_LARGEST_RATIO = 1000  # a ratio above this has a denominator near zero, and is noise


def write(value: Value, unit: Unit) -> str:
    """Write one value; None is a dash, or an empty text in a text column."""
    if isinstance(value, str):
        return value
    if value is None:
        return "" if unit in ("text", "flag") else "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if not math.isfinite(value):
        return str(value)
    return _NUMBERS[unit](value)


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value <= _LARGEST_RATIO else f">{_LARGEST_RATIO}x"


def _reduction(value: float) -> str:
    return _ratio(value) if value <= _LARGEST_RATIO else "all"


def _percent(share: float) -> float:
    return round(100 * share, 1) + 0.0  # turns -0.0 into 0.0


_NUMBERS: dict[Unit, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "share": lambda value: f"{_percent(value):.1f} %",
    "change": lambda value: f"{_percent(value):+.1f} %",
    "ratio": _ratio,
    "reduction": _reduction,
    "rate": _rate,
    "number": lambda value: f"{value:.4g}",
    "difference": lambda value: f"{value + 0.0:+.4g}",
    "count": lambda value: f"{value:.0f}",
    "text": str,
    "flag": str,
}


@dataclass(frozen=True, slots=True)
class SpreadValue:
    """A value and its spread, which is None if unknown.

    The value is a median and the spread half the interquartile range, or both are computed from such values.
    """

    value: float
    spread: float | None = None


def step_time(seconds: Sequence[float] | None) -> SpreadValue | None:
    """Return the median step in seconds; one step has no spread."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return SpreadValue(seconds[0])
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return SpreadValue(middle, (third - first) / 2)


def throughput(batch_size: int, step: SpreadValue | None) -> SpreadValue | None:
    """Return samples a second, with the relative spread of the step."""
    if step is None or step.value <= 0:
        return None
    rate = batch_size / step.value
    return SpreadValue(rate, None if step.spread is None else rate * step.spread / step.value)


def ratio(above: SpreadValue | None, below: SpreadValue | None) -> SpreadValue | None:
    """Return the quotient of two independent values: squares of relative spreads add up."""
    if above is None or below is None or above.value <= 0 or below.value <= 0:
        return None
    quotient = above.value / below.value
    if above.spread is None or below.spread is None:
        return SpreadValue(quotient)
    return SpreadValue(quotient, quotient * math.hypot(above.spread / above.value, below.spread / below.value))


def quotient(above: float | None, below: float | None) -> float | None:
    """Return ``above / below``, or None if one is missing or negative, or ``below`` is zero."""
    return above / below if above is not None and below is not None and above >= 0 and below > 0 else None


def change(before: float | None, after: float | None) -> float | None:
    """Return how much larger ``after`` is, as a share of ``before``."""
    grown = quotient(after, before)
    return None if grown is None else grown - 1


Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table of items.

    Attributes:
        key: Name in CSV and data frames; amounts carry their base unit in it.
        title: Heading.
        unit: ``share`` is a fraction of 1, ``change`` one with a sign, ``ratio`` a factor, ``reduction`` a factor
            that is shown as "all" above 1,000, ``rate`` samples a second.
        compute: Computes the cell of an item.
        better: Which direction is an improvement, where one is.
        spread_of: Key of the column whose plus-minus this one is.
        estimate_of: Key of the column in whose cells this one stands where it has a value; a file has both.
        mark: How such a value is marked.
        detail: Where a terminal is narrow, columns of the highest detail are left out first; those of 0 never.
        yields: Whether it is left out, the last first, where nothing else makes a table narrow enough.
        quiet: Whether only CSV has it, unless it is asked for.
        short: What ``--columns`` calls it, where that is not its title.
    """

    key: str
    title: str
    unit: Unit
    compute: Callable[[Item], Value]
    better: Literal["lower", "higher"] | None = None
    spread_of: str | None = None
    estimate_of: str | None = None
    mark: str = "{} est."
    detail: int = 0
    yields: bool = False
    quiet: bool = False
    short: str = ""

    @property
    def within(self) -> str | None:
        """Key of the column in whose cells people find this one; None for one of its own."""
        return self.spread_of or self.estimate_of

    @property
    def name(self) -> str:
        """What ``--columns`` calls it."""
        return self.short or re.sub(r"[^a-z0-9]+", "-", self.title.lower().replace("/s", " per second"))


def value_of(of: Callable[[Item], SpreadValue | None]) -> Callable[[Item], Value]:
    """Return a function from an item to its value without the spread."""
    return lambda item: spread.value if (spread := of(item)) else None


def with_spread(
    key: str,
    title: str,
    unit: Unit,
    of: Callable[[Item], SpreadValue | None],
    better: Literal["lower", "higher"] | None = None,
    *,
    detail: int = 0,
    spread_key: str | None = None,
    spread_unit: Unit | None = None,
    sign: str = "±",
) -> tuple[Column[Item], Column[Item]]:
    """Return the columns of a value and its spread; key and unit of the spread follow the value's unless given."""

    def spread(item: Item) -> Value:
        return found.spread if (found := of(item)) else None

    return (
        Column(key, title, unit, value_of(of), better, detail=detail),
        Column(spread_key or f"{key}_spread", sign, spread_unit or unit, spread, spread_of=key),
    )


@dataclass(frozen=True)
class Curve:
    """What a page draws of a table: its rows as points, joined by a line.

    Attributes:
        name: In the legend.
        chart: Curves with the same one are drawn in one chart, under this name.
        label: Key of the column that names the points.
        seconds: Key of the column along the x axis.
        bytes: Key of that along the y axis.
        limit_bytes: Drawn as a line across.
    """

    name: str
    chart: str
    label: str
    seconds: str
    bytes: str
    limit_bytes: int | None = None
