"""Cases, and a console that keeps what is drawn on it."""

from __future__ import annotations

import io

from rich.console import Console

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.units import GIB

MEASURED = Measurement(weights_bytes=1, activation_bytes=2, peak_bytes=3 * GIB)


def console(*, terminal, height=30):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, height=height, color_system=None)


def cases(count):
    return [Case(model=f"model{number}", scheme="fewbit:3", batch_size=8) for number in range(count)]


def text_of(progress, height=30):
    drawn = console(terminal=True, height=height)
    drawn.print(progress)
    return drawn.file.getvalue()
