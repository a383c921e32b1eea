"""The names of meters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from actbench import plugins

METERS: Final = ("simulated", "cpu", "cuda")
"""The meters of actbench itself."""

if TYPE_CHECKING:
    MeterName = str
else:  # no validator, which would be called for each of many rows
    MeterName = Literal[(*METERS, *(name for name in plugins.installed("meters") if name not in METERS))]
"""The name of a meter: that of an entry point of ``actbench.meters``."""
