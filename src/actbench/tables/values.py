"""Values of tables: what they can be, and how each kind is written for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from actbench.units import format_bytes, format_seconds

Value = str | int | float | bool | None
Unit = Literal["text", "bytes", "seconds", "share", "change", "ratio", "rate", "count", "number", "flag"]


def write(value: Value, unit: Unit) -> str:
    """Write one value; None is a dash, or nothing where text is expected."""
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


def _percent(share: float) -> float:
    return round(100 * share, 1) + 0.0  # without a minus in front of zero


_NUMBERS: dict[Unit, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "share": lambda value: f"{_percent(value):.1f} %",
    "change": lambda value: f"{_percent(value):+.1f} %",
    "ratio": lambda value: f"{value:.2f}x",
    "rate": _rate,
    "number": lambda value: f"{value:.4g}",
    "count": lambda value: f"{value:.0f}",
    "text": str,
    "flag": str,
}
