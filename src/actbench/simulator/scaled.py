"""What a simulated step of any batch needs, predicted from the steps of two: each storage is nearly affine in the
batch.

Following an allocator takes a hundredth of the time of a simulated step. The prediction is then proved by steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.peak import Event
from actbench.simulator.reserved import reserved_bytes


@dataclass(frozen=True)
class Ran:
    """A simulated step.

    Attributes:
        reading: Its bytes.
        parts: The allocations and frees of two steps in a row.
        streams: The streams of storages on others than the one that computes, by name.
        expandable: Whether segments of the allocator grow.
    """

    reading: MemoryReading
    parts: Sequence[Sequence[Event]]
    streams: Mapping[int, str]
    expandable: bool

    def likens(self, other: Ran) -> bool:
        """Whether another step allocates and frees the same storages in the same order, whatever their sizes."""
        return self.streams == other.streams and [_forms(part) for part in self.parts] == list(map(_forms, other.parts))


def needed_bytes(first: tuple[int, Ran], second: tuple[int, Ran], *, limit_bytes: int) -> Callable[[int], int] | None:
    """Return a function from a batch to the bytes that its step may need: the larger of peak and reserved bytes.

    ``first`` and ``second`` are steps with their batches. None where they differ in more than sizes.
    """
    (batch, ran), (other_batch, other) = first, second
    if not ran.likens(other):
        return None
    names = [[name for name, _ in part] for part in ran.parts]
    amounts = [[np.array([amount for _, amount in part], float) for part in each.parts] for each in (ran, other)]
    peaks = np.array([_peaks(ran.reading), _peaks(other.reading)], float)

    def needed(wanted: int) -> int:
        share = (wanted - batch) / (other_batch - batch)
        peak = int((peaks[0] + share * (peaks[1] - peaks[0])).max())
        if ran.reading.reserved_bytes is None:
            return peak
        scaled = [
            # no size falls to 0, which would be a free
            list(zip(named, np.maximum(np.rint(low + share * (high - low)), low > 0).astype(int).tolist(), strict=True))
            for named, low, high in zip(names, *amounts, strict=True)
        ]
        reserved = reserved_bytes(scaled, limit_bytes=limit_bytes, expandable=ran.expandable, streams=ran.streams)
        return max(peak, reserved)

    return needed


def _forms(part: Sequence[Event]) -> list[tuple[int, bool]]:
    return [(name, amount > 0) for name, amount in part]


def _peaks(reading: MemoryReading) -> list[int]:
    """Return the peak of each phase, each of which is affine by itself; the peak alone where phases are unknown."""
    phases = [] if reading.phase_peaks is None else list(reading.phase_peaks.model_dump().values())
    return phases if phases and max(phases) == reading.peak_bytes else [reading.peak_bytes] * 3
