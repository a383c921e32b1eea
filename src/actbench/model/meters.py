"""The names of meters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from actbench import plugins

METERS: Final = ("simulated", "cpu", "cuda")
"""The meters of actbench itself."""

MeterName = str
"""The name of a meter: of an entry point of ``actbench.meters``. Records may have one that is not installed here."""

if TYPE_CHECKING:
    InstalledMeter = str
else:
    InstalledMeter = Literal[(*METERS, *(name for name in plugins.installed("meters") if name not in METERS))]
"""The name of a meter that is installed here, which flags and recipes may ask for."""
