"""The names of meters."""

from __future__ import annotations

MeterName = str
"""The name of a meter: of an entry point of ``actbench.meters``. Records may have one that is not installed here."""
