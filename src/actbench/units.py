"""Reads and writes bytes and seconds as people do; types of fields that hold counts.

Everything else in actbench holds bytes and seconds as plain numbers in base units.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final

from pydantic import Field

from actbench.errors import UsageError

COUNT_LIMIT: Final = 2**63
"""Every count, number of bytes and seed is smaller: torch counts in signed 64 bits."""
MOST_PROCESSES: Final = 1 << 16
"""Most processes that train together."""
LONGEST_SECONDS: Final = 1e7
"""Longest time that a user may ask for: 115 days."""

NonNegativeInt = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
PositiveInt = Annotated[int, Field(gt=0, lt=COUNT_LIMIT)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(strict=True, gt=0, lt=COUNT_LIMIT)]
SignedInt = Annotated[int, Field(gt=-COUNT_LIMIT, lt=COUNT_LIMIT)]


KIB, MIB, GIB = 1024, 1024**2, 1024**3

_FACTORS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": 1024**4,
    "tib": 1024**4,
}


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``16GiB``, ``512 MB``, ``1.5g`` or ``4096B``; the unit is required.

    Raises:
        UsageError: The text is not a positive number followed by a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTORS:
        raise UsageError(f"{text!r} is not an amount of memory: write a number and a unit, such as 16GiB or 512MiB")
    size = float(match[1]) * _FACTORS[match[2].lower()]
    if size >= COUNT_LIMIT:
        raise UsageError(f"{text!r} is not an amount of memory: it is more than 8 EiB")
    amount = round(size)
    if amount <= 0:
        raise UsageError(f"{text!r} is not an amount of memory: it must be more than zero")
    return amount


def format_bytes(amount: float) -> str:
    """Write bytes with the largest binary unit that keeps the number at 1 or more, such as ``1.50 GiB``."""
    size = abs(amount)
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{amount / factor:,.2f} {unit}"
    return f"{amount:,.0f} B"


def format_seconds(amount: float) -> str:
    """Write seconds with a unit that suits their size, such as ``12.3 ms``."""
    if not math.isfinite(amount):
        return "?"
    if amount >= 60:
        minutes, seconds = divmod(round(amount), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h {minutes:02d}m {seconds:02d}s" if hours else f"{minutes}m {seconds:02d}s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 1e-9:.3g} ns"


def counted(number: int, noun: str) -> str:
    """Return a number with a regular noun: ``1 row``, ``1,024 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
