"""What is known of the memory of a case while it runs: news for a view that follows it."""

from __future__ import annotations

from typing import Literal

from actbench.model.data import Data
from actbench.model.records import Phase
from actbench.units import NonNegativeInt

HOLDERS = 8
"""Most holders in a report."""


class LiveMemory(Data):
    """News, before the answer, of the memory of a case.

    Attributes:
        live_bytes: Bytes alive now.
        peak_bytes: The most so far, steps that have ended included.
        limit_bytes: What may be used; None if unknown.
        step: The number of the step that runs, or that has just ended; None where one alone is measured.
        phase: The part of the step.
        samples: Bytes alive since the last report, in order.
        holders: Who holds the most now, by line of the script, else by module.
    """

    kind: Literal["live"] = "live"
    live_bytes: NonNegativeInt
    peak_bytes: NonNegativeInt
    limit_bytes: NonNegativeInt | None = None
    step: NonNegativeInt | None = None
    phase: Phase | None = None
    samples: tuple[NonNegativeInt, ...] = ()
    holders: tuple[tuple[str, NonNegativeInt], ...] = ()
