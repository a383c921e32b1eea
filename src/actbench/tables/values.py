"""Values of tables: what they can be, and how each kind is written for people."""

from __future__ import annotations

import math
from typing import Literal

from actbench.units import format_bytes, format_seconds

Value = str | int | float | bool | None
Unit = Literal["text", "bytes", "seconds", "share", "change", "ratio", "rate", "count", "number", "flag"]


def write(value: Value, unit: Unit) -> str:
    """Write one value; None is a dash, or nothing where text is expected."""
    if value is None:
        return "" if unit in ("text", "flag") else "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return _number(value, unit)


def _number(value: float, unit: Unit) -> str:
    match unit:
        case "bytes":
            return format_bytes(value)
        case "seconds":
            return format_seconds(value)
        case "share":
            return f"{_percent(value):.1f} %"
        case "change":
            return f"{_percent(value):+.1f} %"
        case "ratio":
            return f"{value:.2f}x"
        case "rate":
            return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
        case "number":
            return f"{value:.4g}"
        case "count":
            return f"{value:.0f}"
        case _:
            return f"{value}"


def _percent(share: float) -> float:
    return round(100 * share, 1) + 0.0  # without a minus in front of zero
