"""The CPU meter: the allocations of torch's allocator, and wall time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from actbench.machine import available_memory_bytes
from actbench.measuring.meters import footprint, tracedstep
from actbench.measuring.meters.meter import (
    MemoryReading,
    Meter,
    MeterKind,
    allocation_failures,
    at_once,
    forward_alone,
    held_by_cycles,
)
from actbench.measuring.meters.peak import Moments
from actbench.measuring.meters.trace import AllocationTrace
from actbench.measuring.meters.tracedstep import TracedStep
from actbench.measuring.meters.watch import Watch
from actbench.model.meters import MeterName
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.scheme.wrapped import renews_next
from actbench.simulator.card import CPU as HOST
from actbench.workload.base import moved


class CpuMeter(Meter):
    """Reads the allocations of torch's CPU allocator, and the wall clock, in separate passes.

    Without a memory limit a step may use the memory that is available on this machine now.
    """

    name: MeterName = "cpu"
    materialize = True
    device = HOST

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        self.memory_bytes: int = memory_limit_bytes or available_memory_bytes()

    def active(self, step: TrainStep | None = None) -> AbstractContextManager[None]:
        """Report failed allocations as :class:`actbench.errors.OutOfMemoryError`, with the phase of a step."""
        return allocation_failures("the CPU", self.memory_bytes, step)

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this device."""
        return nullcontext()

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to the CPU, in place."""
        setup.module.to("cpu")
        return setup

    def place(self, batch: Batch) -> Batch:
        """Bring the batch to the CPU."""
        return moved(batch, "cpu")

    def memory(self, step: TrainStep, watch: Watch | None = None, *, first: Batch | None = None) -> MemoryReading:
        """Run the step twice and read the allocator's events of the second run.

        The first run is traced too, so that the bytes that it leaves, such as optimizer state, are known exactly. It
        may be of another batch, ``first``, that takes less time: unless the second run then leaves as many bytes as it
        found, both are run again with the whole batch.
        """
        reading, is_steady = self._read(step, watch, first)
        return reading if is_steady or first is None else self._read(step, watch, None)[0]

    def _read(self, step: TrainStep, watch: Watch | None, first: Batch | None) -> tuple[MemoryReading, bool]:
        held = tracedstep.held_before(step)
        trace = AllocationTrace(made_node=watch.made_node if watch else None)
        traced = TracedStep(trace, step)
        with self.active(step), trace, watch.watching(trace.around_module) if watch else nullcontext():
            if first is None:
                step()
            else:
                whole, step.batch = step.batch, first
                step()
                step.batch = whole
                assert step.micro_batches  # cut before the run that counts, as by a first run
            gc.collect()
            ends = iter(("alone", "alone, forward"))
            is_alone = forward_alone(step, lambda: trace.mark(next(ends))) is not None
            renews_next(step.optimizer)
            traced.begin()
            step.around_forward, step.around_cache = traced.turn, traced.cache
            own = footprint.own_weights(step.setup.module)
            loss = step.forward()
            trace.mark("forward")
            gathered_bytes = footprint.stored_bytes(footprint.gathered(step.setup.module, own))
            step.backward(loss)
            gradients_bytes = footprint.stored_bytes(footprint.gradients(step))
            traced.backward()
            step.around_forward = lambda: None
            step.update()
            traced.end()
            loss = step.loss
            trace.mark("released")
            gc.collect()
            trace.mark("collected")
        base = tracedstep.parts_of(held)
        begun, forwarded = ("alone", "alone, forward") if is_alone else ("begin", "forward")
        peak_at = traced.peak_at
        if watch:
            watch.events = traced.events(held)
        peak_bytes = sum(base.model_dump().values()) + trace.peak_bytes("begin", "end")
        step.notes = held_by_cycles(trace.live_bytes("released") - trace.live_bytes("collected"), peak_bytes)
        reading = MemoryReading(
            weights_bytes=footprint.stored_bytes(footprint.weights(step.setup.module)),
            gradients_bytes=gradients_bytes,
            optimizer_bytes=footprint.stored_bytes(footprint.optimizer_state(step.optimizer)),
            activation_bytes=trace.live_bytes(forwarded) - trace.live_bytes(begun) - gathered_bytes,
            peak_bytes=peak_bytes,
            peak_phase=traced.moments.phase(peak_at),
            peak_parts=Moments.parts(trace.events, peak_at, traced.kinds, base),
            loss=loss.item(),
        )
        is_steady = trace.live_bytes("end") == trace.live_bytes("begin")
        return reading.against(self.memory_bytes), is_steady

    def seconds(self, step: TrainStep, steps: int, before: Callable[[], object] = at_once) -> tuple[float, ...]:
        """Run steps and return the wall time of each; an OutOfMemoryError if an allocation failed."""
        taken = []
        with self.active(step):
            for _ in range(steps):
                before()
                started = time.perf_counter()
                step()
                taken.append(time.perf_counter() - started)
        return tuple(taken)


CPU: Final = MeterKind(lambda case: CpuMeter(case.memory_limit_bytes))
