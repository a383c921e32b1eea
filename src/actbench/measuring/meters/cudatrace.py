"""Reads a step on a CUDA device with the holder of each allocation.

Torch has two histories of its allocator. ``torch.cuda.memory._record_memory_history`` has requested bytes, but the
counters, and so the reported peak, count the bytes of blocks. Torch's profiler has the blocks, so that sums are equal
to the byte, and the operators around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from actbench.errors import MeasurementError
from actbench.measuring.meters import footprint, tracedstep
from actbench.measuring.meters.base import MemoryReading
from actbench.measuring.meters.stepevents import HostEvent, Origin
from actbench.measuring.meters.trace import ON_HOST, STATE_ON_HOST, AllocationTrace
from actbench.measuring.meters.tracedstep import TracedStep
from actbench.measuring.meters.watch import Watch
from actbench.results.ledger import OUTSIDE
from actbench.results.timeline import OPTIMIZER
from actbench.setup import TrainStep


def watched(
    step: TrainStep,
    watch: Watch,
    settle: Callable[[TrainStep], None],
    read: Callable[[TrainStep, TracedStep], MemoryReading],
) -> MemoryReading:
    """Read a step, and give ``watch`` all allocations and frees.

    For host memory, only the bytes between the parts of the step are known.

    Args:
        step: The step.
        watch: Receives the events.
        settle: Brings the step into the steady state.
        read: Reads the counters of one step, and marks its moments in a trace.

    Raises:
        MeasurementError: The events do not add up to the peak of the counters.
    """
    held = [each for each in tracedstep.held_before(step) if each.device == "cuda"]
    unseen_bytes = torch.cuda.memory_allocated() - sum(each.amount for each in held)
    trace = AllocationTrace("cuda", watch.made_node)
    traced = TracedStep(trace, step)
    with trace, watch.watching(trace.around_module):
        settle(step)
        reading = read(step, traced)
    found = traced.events(held, unseen_bytes=unseen_bytes)
    if found.peak_bytes != reading.peak_bytes or any(amount < 0 for _, amount in found.events):
        raise MeasurementError(
            f"--timeline: torch's allocator counts a peak of {reading.peak_bytes:,} bytes, and its events in the "
            f"profiler add up to {found.peak_bytes:,}: its holders are unknown here; measure without --timeline"
        )
    shift = len(found.events) - trace.events_until("end")
    watch.events = replace(
        found,
        host=list(_on_host(step, traced, shift)),
        origins={
            **found.origins,
            ON_HOST: Origin(OUTSIDE, "moved by a scheme"),
            STATE_ON_HOST: Origin(OPTIMIZER, "state"),
        },
    )
    return reading


def _on_host(step: TrainStep, traced: TracedStep, shift: int) -> Iterator[HostEvent]:
    """Yield the bytes in host memory at the marked moments; optimizer state is there all the time."""
    state = [tensor for tensor in footprint.optimizer_state(step.optimizer) if not tensor.is_cuda]
    yield HostEvent(0, STATE_ON_HOST, footprint.stored_bytes(state))
    for at, amount in traced.host:
        yield HostEvent(at + shift, ON_HOST, amount)
