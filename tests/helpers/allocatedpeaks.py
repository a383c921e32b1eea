"""The most that torch's CPU allocator has had alive while a function ran."""

from __future__ import annotations

from collections.abc import Callable

from actbench.measuring.meters.trace import AllocationTrace


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most bytes alive of all that torch's allocator made while ``run`` ran, by its own events."""
    trace = AllocationTrace()
    with trace:
        trace.mark("begin")
        run()
        trace.mark("end")
    return trace.peak_bytes("begin", "end")
