"""What all meters share, and the memory limit of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch

from actbench import scheme as schemes
from actbench.errors import ActbenchError, OutOfMemoryError, first_line, is_out_of_memory
from actbench.measuring.meters import footprint
from actbench.measuring.meters.snapshot import snapshot_of
from actbench.measuring.meters.watch import Watch
from actbench.model.advice import FLAGS, PHASES, Settings, advice, helping_changes
from actbench.model.blocks import BlockReadings
from actbench.model.estimated import Communication, EstimatedTime
from actbench.model.measured import Generated, PeakParts, PhasePeaks
from actbench.model.meters import MeterName
from actbench.model.records import Case, Phase
from actbench.scheme.microbatches import Batch, rows_of
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.units import format_bytes

Read = TypeVar("Read")


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one training step in the steady state (optimizer state present); None if a meter cannot know."""

    weights_bytes: int
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activation_bytes: int
    peak_bytes: int
    peak_phase: Phase | None = None
    peak_parts: PeakParts | None = None
    remedies: tuple[str, ...] = ()
    phase_peaks: PhasePeaks | None = None
    generated: Generated | None = None
    memory_limit_bytes: int | None = None
    over_limit_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    process_bytes: int | None = None
    loss: float | None = None
    estimated: EstimatedTime | None = None
    communication: tuple[Communication, ...] | None = None
    untimed: str | None = None
    simulated: Literal["cpu", "cuda"] | None = None
    approximate: tuple[str, ...] = ()
    blocks: BlockReadings | None = None

    def against(self, memory_bytes: int) -> MemoryReading:
        """Return this reading with a memory limit, the bytes needed above it, and schemes that may lower the peak."""
        over = max(self.peak_bytes, self.reserved_bytes or 0) - memory_bytes
        found = replace(self, memory_limit_bytes=memory_bytes, over_limit_bytes=over if over > 0 else None)
        if self.peak_phase is None:
            return found
        parts, phase = self.peak_parts, self.peak_phase
        is_model = parts is not None and parts.are_mostly_model
        of_optimizer = parts is None or parts.are_of_optimizer(phase)
        changes = helping_changes(phase, mostly_model=is_model, of_optimizer=of_optimizer)
        return replace(found, remedies=tuple(schemes.examples(changes)))

    def of_generation(
        self, cache_bytes: int, longest_prompt: int | None, seconds: tuple[float, ...] = ()
    ) -> MemoryReading:
        """Return this reading, of a generation, with the names of its parts.

        Args:
            cache_bytes: As of `Generated`.
            longest_prompt: As of `Generated`.
            seconds: Estimated time of the prefill, and of some of the passes after it, the first and the last too.
        """
        peaks = self.phase_peaks
        told = Generated(
            cache_bytes=cache_bytes,
            prefill_bytes=peaks and peaks.forward_bytes,
            generation_bytes=peaks and peaks.backward_bytes,
            longest_prompt=longest_prompt,
            prefill_seconds=seconds[0] if seconds else None,
            token_seconds=(seconds[1] + seconds[-1]) / 2 if len(seconds) > 1 else None,
        )
        phase: Phase | None = self.peak_phase and ("prefill" if self.peak_phase == "forward" else "generation")
        return replace(self, phase_peaks=None, peak_phase=phase, loss=None, remedies=(), generated=told)


def forward_alone(step: TrainStep, read: Callable[[], Read]) -> tuple[Read, Read] | None:
    """Run a forward pass while the loop goes on holding what it holds between steps, and drop the results.

    All that is alive in addition at its end is activations: in the forward pass of a step, the loop frees what it held,
    and then holds outputs that may be saved for the backward pass or not.

    Returns:
        What ``read`` returned before the pass and at its end; None if the loop holds nothing between steps, or the
        weights are shared out over processes, and a pass without its backward pass would leave them gathered.
    """
    held = step.setup.retained_outputs
    if held is None or footprint.own_weights(step.setup.module):
        return None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices), held.staying():
        before = read()
        loss = step.forward()
        after = read()
        del loss
        step.abandon()
        gc.collect()
    return before, after


_SHARE = 100
"""Memory in reference cycles is a warning from a hundredth of the peak."""


def held_by_cycles(held_bytes: int, peak_bytes: int) -> tuple[str, ...]:
    """Return a warning about memory that a step leaves in reference cycles, if it is much of the peak."""
    if held_bytes * _SHARE < peak_bytes:
        return ()
    warning = (
        f"reference cycles hold {format_bytes(held_bytes)} after each step until Python's collector runs, which may be "
        "steps later; until then peaks are higher by as much: let torch.autograd.Function keep tensors by "
        "ctx.save_for_backward, and not as attributes of ctx"
    )
    return (warning,)


def at_once() -> None:
    """Begin a step without waiting for others."""


class Meter(Protocol):
    """Reads bytes and seconds of a training step on one kind of device.

    Attributes:
        materialize: Whether it needs a model with real weights.
        memory_bytes: Memory that a step may use: the memory limit, or what the device has for a step.
        device: Where tensors of a step are.
    """

    name: MeterName
    materialize: bool
    memory_bytes: int
    device: torch.device

    def active(self) -> AbstractContextManager[Any]:
        """Enter the contexts for building batches and running steps (a fake tensor mode, operators, a limit)."""

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this meter's device."""

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to this meter's device, in place, before any scheme is applied."""

    def place(self, batch: Batch) -> Mapping[str, Any]:
        """Bring a batch to this meter's device."""

    def memory(self, step: TrainStep, watch: Watch | None = None) -> MemoryReading:
        """Run the step twice, first to reach the steady state, and read the bytes of the second run.

        A step that needs more than ``memory_bytes`` is read too, if it can run. ``watch`` receives all allocations
        and frees of the second run.

        Raises:
            OutOfMemoryError: The step cannot run: an allocation failed.
        """

    def snapshot(self, step: TrainStep) -> dict[str, Any]:
        """Run the step like :meth:`memory`, and return its memory as ``torch.cuda.memory._snapshot`` does.

        Raises:
            OutOfMemoryError: The step cannot run: an allocation failed.
        """
        watch = Watch(step)
        self.memory(step, watch)
        return snapshot_of(watch.read())

    def seconds(self, step: TrainStep, steps: int, before: Callable[[], object] = at_once) -> tuple[float, ...] | None:
        """Run ``steps`` steps and return the seconds of each, or None when this meter has no clock.

        ``before`` is called before each step, and not timed.
        """


@dataclass(frozen=True)
class MeterKind:
    """A kind of meter: what an entry point of ``actbench.meters`` names.

    Attributes:
        open: Returns the meter of a case; raises a MeasurementError if its device is missing.
        check: Raises a MeasurementError, before anything runs, if its device is missing.
    """

    open: Callable[[Case], Meter]
    check: Callable[[], object] = lambda: None


@contextmanager
def allocation_failures(
    device: str, memory_bytes: int, step: TrainStep | None = None, settings: Settings = FLAGS
) -> Iterator[None]:
    """Turn a failed allocation of any kind into an :class:`OutOfMemoryError`.

    ``step`` is the running step, if any; ``settings`` are what the user can change.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ActbenchError) or not is_out_of_memory(error):
            raise
        reason = first_line(error)
        phase = None if step is None else step.phase
        message = f"the step does not fit on {device}, which may use {format_bytes(memory_bytes)} ({reason}); "
        held = 0 if step is None else footprint.model_bytes(step)
        if phase is not None:
            message += f"memory ran out in the {PHASES[phase]}, where weights, gradients and optimizer state hold "
            message += f"{format_bytes(held)}; "
        if step is not None and rows_of(step.batch) == 1:
            settings = settings._replace(batch=None)
        message += advice(phase, mostly_model=2 * held > memory_bytes, find=schemes.changing, settings=settings)
        raise OutOfMemoryError(message, phase) from error
