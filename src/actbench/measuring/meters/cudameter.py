"""The CUDA meter: torch's caching allocator, the driver's number, and CUDA events."""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import pynvml
import torch

from actbench.errors import MeasurementError
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
from actbench.measuring.meters.stepevents import HostEvent, Origin
from actbench.measuring.meters.trace import ON_HOST, STATE_ON_HOST, AllocationTrace
from actbench.measuring.meters.tracedstep import TracedStep
from actbench.measuring.meters.watch import Watch
from actbench.model.ledger import OUTSIDE
from actbench.model.measured import PeakParts
from actbench.model.meters import MeterName
from actbench.model.records import Phase
from actbench.model.timeline import OPTIMIZER
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.scheme.wrapped import renews_next
from actbench.simulator import profiles
from actbench.simulator.card import operators_of
from actbench.workload.base import moved


def check_cuda(flag: str = "--meter", instead: str = "simulated") -> None:
    """Check that torch sees a CUDA device.

    ``flag`` is the flag that asks for CUDA, and ``instead`` is its value that needs no device.

    Raises:
        MeasurementError: Torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        raise MeasurementError(
            f"{flag} cuda: torch sees no CUDA device here; use {flag} {instead}, which needs none"
            " ('actbench doctor' says what is missing)"
        )


def profile_of_device() -> profiles.DeviceProfile:
    """Return what simulations have to know of the current CUDA device to count its bytes."""
    found = torch.cuda.get_device_properties()
    capability = (found.major, found.minor)
    return profiles.DeviceProfile(
        found.name, found.total_memory, capability, multiprocessors=found.multi_processor_count
    )


class CudaMeter(Meter):
    """Reads the peak of torch's CUDA allocator on the current device, and the device's clock, in separate passes.

    The memory limit is the memory that the allocator may take from the device.

    Raises:
        MeasurementError: Torch sees no CUDA device.
    """

    name: MeterName = "cuda"
    materialize = True
    device = torch.device("cuda")

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        check_cuda()
        properties = torch.cuda.get_device_properties()
        self._device_name: str = properties.name
        self._total_bytes: int = properties.total_memory
        self.memory_bytes = min(memory_limit_bytes or self._total_bytes, self._total_bytes)

    @contextmanager
    def active(self, step: TrainStep | None = None) -> Iterator[None]:
        """Hold the allocator to the limit, and report failed allocations, with a step's phase, as OutOfMemoryError."""
        before = torch.cuda.get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction(self.memory_bytes / self._total_bytes)
        try:
            with allocation_failures(self._device_name, self.memory_bytes, step):
                yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before)

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this device."""
        return operators_of(profile_of_device())

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to the device, in place; an OutOfMemoryError if not even the weights fit."""
        with self.active():
            setup.module.to("cuda")
        return setup

    def place(self, batch: Batch) -> Batch:
        """Bring the batch to the device; an OutOfMemoryError if it does not fit."""
        with self.active():
            return moved(batch, "cuda")

    def memory(self, step: TrainStep, watch: Watch | None = None) -> MemoryReading:
        """Run the step twice and read the allocator's counters of the second run.

        Raises:
            OutOfMemoryError: An allocation failed.
            MeasurementError: The events for ``watch`` do not add up to the counters.
        """
        _set_allocator(step.setup)
        with self.active(step):
            if watch is not None:
                return _watched(step, watch).against(self.memory_bytes)
            return _read(step, _settle(step)).against(self.memory_bytes)

    def snapshot(self, step: TrainStep) -> dict[str, Any]:
        """Run the step twice and return torch's own snapshot of the second run; its bytes are the requested ones."""
        _set_allocator(step.setup)
        with self.active(step):
            _settle(step)
            torch.cuda.memory._record_memory_history(stacks="python", clear_history=True)
            try:
                step()
                torch.cuda.synchronize()
                found: dict[str, Any] = torch.cuda.memory._snapshot()
            finally:
                torch.cuda.memory._record_memory_history(None)
        return found

    def seconds(self, step: TrainStep, steps: int, before: Callable[[], object] = at_once) -> tuple[float, ...]:
        """Run steps and return the time of each on the device's clock; an OutOfMemoryError if an allocation failed."""
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        spans = [(event(), event()) for _ in range(steps)]
        _set_allocator(step.setup)
        with self.active(step):
            torch.cuda.synchronize()
            for begin, end in spans:
                before()
                begin.record()
                step()
                end.record()
            torch.cuda.synchronize()
        return tuple(begin.elapsed_time(end) / 1000 for begin, end in spans)


def _set_allocator(setup: TrainingSetup) -> None:
    """If a scheme asks for it, let the allocator use expandable segments, for the rest of this process."""
    if setup.expandable_segments:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def _settle(step: TrainStep) -> tuple[int, int] | None:
    """Bring the step into the steady state, begin a new peak, and return the bytes around a pass alone, if any."""
    step()
    gc.collect()
    alone = forward_alone(step, torch.cuda.memory_allocated)
    renews_next(step.optimizer)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return alone


def _read(step: TrainStep, alone: tuple[int, int] | None, traced: TracedStep | None = None) -> MemoryReading:
    """Run one step and return the counters; mark its moments in a trace, if there is one.

    The activations are those of a forward pass ``alone``, if there was one.
    """
    before = torch.cuda.memory_allocated()
    peaks: dict[Phase, int] = {}
    reserved = []

    def end(phase: Phase) -> None:
        peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    turns: Iterator[Phase | None] = itertools.chain((None,), itertools.cycle(("forward", "backward")))

    def turn() -> None:
        """End the part before or after the forward pass of a micro-batch; no part ends before the first."""
        if ended := next(turns):
            end(ended)
        if traced:
            traced.turn()

    if traced:
        traced.begin()
    step.around_forward = turn
    own = footprint.own_weights(step.setup.module)
    loss = step.forward()
    after = torch.cuda.memory_allocated() - footprint.stored_bytes(footprint.gathered(step.setup.module, own))
    step.backward(loss)
    if traced:
        traced.backward()
    gradients_bytes = footprint.stored_bytes(footprint.beside_batch(step, footprint.gradients(step)))
    end("backward")
    step.around_forward = lambda: None
    step.update()
    if traced:
        traced.end()
    torch.cuda.synchronize()
    end("optimizer")
    state = [tensor for tensor in footprint.optimizer_state(step.optimizer) if tensor.is_cuda]
    phase = max(peaks, key=peaks.__getitem__)
    reading = MemoryReading(
        weights_bytes=footprint.stored_bytes(footprint.beside_batch(step, footprint.weights(step.setup.module))),
        gradients_bytes=gradients_bytes,
        optimizer_bytes=footprint.stored_bytes(state),
        activation_bytes=after - before if alone is None else alone[1] - alone[0],
        peak_bytes=peaks[phase],
        peak_phase=phase,
        reserved_bytes=max(reserved),
        process_bytes=_process_bytes(),
        loss=step.loss.item(),
    )
    del loss
    kept = torch.cuda.memory_allocated()
    gc.collect()
    step.notes = held_by_cycles(kept - torch.cuda.memory_allocated(), reading.peak_bytes)
    return replace(reading, peak_parts=_parts(reading, before)) if phase == "optimizer" else reading


def _parts(reading: MemoryReading, before_bytes: int) -> PeakParts | None:
    """Return the parts of a peak in the optimizer's step, or None; the allocator's counters do not tell others.

    Before a step, weights, optimizer state and the batch are allocated. None too if the optimizer steps in the
    backward pass, so that not all gradients exist at once.
    """
    weights, state, gradients = reading.weights_bytes, reading.optimizer_bytes or 0, reading.gradients_bytes or 0
    temporary = reading.peak_bytes - before_bytes - gradients
    if temporary < 0 or before_bytes < weights + state:
        return None
    return PeakParts(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        batch_bytes=before_bytes - weights - state,
        temporary_bytes=temporary,
    )


def _process_bytes() -> int | None:
    """Return the memory of this process by the driver, with the CUDA context; None if the driver does not tell."""
    try:
        pynvml.nvmlInit()  # type: ignore[no-untyped-call]
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def _watched(step: TrainStep, watch: Watch) -> MemoryReading:
    """Read a step, and give ``watch`` all allocations and frees; of host memory, the bytes between parts of the step.

    Torch has two histories of its allocator. ``torch.cuda.memory._record_memory_history`` has requested bytes, but the
    counters, and so the reported peak, count the bytes of blocks. Torch's profiler has the blocks, so that sums are
    equal to the byte, and the operators around them.
    """
    held = [each for each in tracedstep.held_before(step) if each.device == "cuda"]
    unseen_bytes = torch.cuda.memory_allocated() - sum(each.amount for each in held)
    trace = AllocationTrace("cuda", watch.made_node)
    traced = TracedStep(trace, step)
    with trace, watch.watching(trace.around_module):
        reading = _read(step, _settle(step), traced)
    found = traced.events(held, unseen_bytes=unseen_bytes)
    if found.peak_bytes != reading.peak_bytes or any(amount < 0 for _, amount in found.events):
        raise MeasurementError(
            f"--timeline: torch's allocator counts a peak of {reading.peak_bytes:,} bytes, and its events in the "
            f"profiler add up to {found.peak_bytes:,}: the holders of the peak are unknown; measure without --timeline"
        )
    shift = len(found.events) - trace.events_until("end")
    state = [tensor for tensor in footprint.optimizer_state(step.optimizer) if not tensor.is_cuda]
    on_host = [HostEvent(at + shift, ON_HOST, amount) for at, amount in traced.host]
    watch.events = replace(
        found,
        host=[HostEvent(0, STATE_ON_HOST, footprint.stored_bytes(state)), *on_host],  # state is there all the time
        origins={
            **found.origins,
            ON_HOST: Origin(OUTSIDE, "moved by a scheme"),
            STATE_ON_HOST: Origin(OPTIMIZER, "state"),
        },
    )
    return reading


CUDA: Final = MeterKind(lambda case: CudaMeter(case.memory_limit_bytes), check_cuda)
