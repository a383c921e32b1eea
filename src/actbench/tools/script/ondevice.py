"""A training script that runs as it is on a CUDA device, whose allocator is asked between the parts of a step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from actbench.device.patches import replaced
from actbench.errors import MeasurementError
from actbench.measuring.meters import cudameter, footprint
from actbench.measuring.meters.meter import MemoryReading, held_by_cycles
from actbench.model.measured import Measurement
from actbench.model.records import Built, Phase
from actbench.tools.script.scriptrun import TIMED, ScriptRun
from actbench.tools.script.steps import reading
from actbench.tools.script.steps.counting import Counting, Step
from actbench.tools.script.steps.reading import Held
from actbench.tools.script.steps.remarks import about_steps
from actbench.tools.script.steps.steps import Steps


class CudaRun(ScriptRun):
    """Runs the training steps inside its block on the current CUDA device, and reads torch's allocator.

    Nothing of the script is changed. The block ends by itself after two equal steps in a row, or after ``steps`` steps,
    and a few that are only timed, by the device's clock.

    Args:
        memory_limit_bytes: Memory that may be used; None for all of the device.
        options: Those of :class:`~actbench.tools.script.scriptrun.ScriptRun`.

    Raises:
        MeasurementError: Torch sees no CUDA device.
    """

    def __init__(self, *, memory_limit_bytes: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._meter = cudameter.CudaMeter(memory_limit_bytes)
        self._counting = AllocatorCounts(lambda: self.steps.phase)
        self.steps = Steps(self._counting, self._ended)
        self._read: dict[int, Measurement] = {}
        self._is_enough = False
        self._marks: list[Any] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._meter.active())
            stack.enter_context(self._counting.watched())
            stack.enter_context(self.lines.watching())
            stack.enter_context(self.steps.followed())
            self._counting.begin()
            self._stack = stack.pop_all()
        return self

    @property
    def measurement(self) -> Measurement:
        """What was read of the last step; a MeasurementError if no step ended."""
        if not self._read:
            raise MeasurementError("no training step ended: no optimizer of torch has stepped")
        torch.cuda.synchronize()
        found, about = self._read[id(self.steps.largest())], tuple(about_steps(self.steps, 1))
        assert found.built is not None
        built = found.built.model_copy(update={"step_peaks": tuple(self.steps.peaks())})
        marks = self._marks[: TIMED + 1]
        seconds = tuple(first.elapsed_time(last) / 1000 for first, last in itertools.pairwise(marks))
        return found.model_copy(
            update={"step_seconds": seconds or None, "built": built, "warnings": (*about, *found.warnings)}
        )

    def _ended(self, step: Step) -> None:
        if not self._is_enough:
            held = reading.held(self._counting, self.lines, self.steps.optimizers)
            self._read[id(step)] = self._reading(step, held)
            self._stepped(len(self.steps.done), step)
            if self._live is not None:
                self._live.follow(limit=lambda: self._meter.memory_bytes)
                self._live.report(step.live_bytes, step.peak_bytes, step=len(self.steps.done))
            self._is_enough = self.steps.are_enough(self._limit)
            self.steps.only_timed_from = len(self.steps.done) if self._is_enough else None
            self.steps.renew()
        if self._is_enough:
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record()
            if len(self._marks) > TIMED:
                self.ending.end(self.lines.roots)

    def _reading(self, step: Step, held: Held) -> Measurement:
        counts = self._counting
        read = MemoryReading(
            weights_bytes=held.weights_bytes,
            gradients_bytes=step.gradients_bytes,
            optimizer_bytes=held.state_bytes,
            activation_bytes=counts.activation_bytes,
            peak_bytes=step.peak_bytes,
            peak_phase=counts.peak_phase,
            reserved_bytes=counts.reserved_bytes,
        ).against(self._meter.memory_bytes)
        return Measurement(
            **vars(read),
            dtype=held.dtype,
            autocast=held.autocast,
            optimizer=held.optimizers,
            built=Built(model_class=held.models, batch_size=step.rows),
            warnings=held_by_cycles(step.cyclic_bytes, step.peak_bytes),
        )


class AllocatorCounts(Counting):
    """Counts by torch's CUDA allocator: its peak in each part of a step.

    The script's own questions about the peak are answered as in a run that is not measured.

    Args:
        phase: Tells which part of the step runs.

    Attributes:
        activation_bytes: What the last forward pass of the step left; ``peak_phase`` is the part with the peak.
        reserved_bytes: The most that the allocator had of the device in the step.
    """

    is_cuda = False  # tensors are: optimizers choose for themselves

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase = phase
        self._moments = 0
        self._peaks: dict[Phase, int] = {}
        self._forward_from = 0
        self._asked = {"max_memory_allocated": 0, "max_memory_reserved": 0}
        self._own: dict[str, Callable[[], int]] = {}
        self.activation_bytes = self.reserved_bytes = 0
        self.peak_phase: Phase | None = None

    def watched(self) -> ExitStack:
        """Return a block in which the script's resets of the peak, and its questions about it, are its own."""
        with ExitStack() as stack:
            self._own = {name: getattr(torch.cuda, name) for name in (*self._asked, "reset_peak_memory_stats")}
            for owner in (torch.cuda, torch.cuda.memory):
                for name in self._asked:
                    stack.enter_context(replaced(owner, name, self._answering(name)))
                stack.enter_context(replaced(owner, "reset_peak_memory_stats", self._resetting))
            return stack.pop_all()

    def _answering(self, name: str) -> Callable[[Any], Any]:
        return lambda own: lambda device=None: max(own(device), self._asked[name])

    def _resetting(self, own: Callable[..., None]) -> Callable[..., None]:
        def reset(device: Any = None) -> None:
            self._note(self._phase())
            self._asked = dict.fromkeys(self._asked, 0)
            own(device)

        return reset

    def _note(self, phase: Phase) -> None:
        """Note the peak since the last call for a part of the step, and begin a new one."""
        allocated, reserved = self._own["max_memory_allocated"](), self._own["max_memory_reserved"]()
        self._peaks[phase] = max(self._peaks.get(phase, 0), allocated)
        self.reserved_bytes = max(self.reserved_bytes, reserved)
        for name, amount in zip(self._asked, (allocated, reserved), strict=True):
            self._asked[name] = max(self._asked[name], amount)
        self._own["reset_peak_memory_stats"]()

    def now(self, part: Phase) -> int:
        """Note the peak of the part that ends now."""
        allocated = torch.cuda.memory_allocated()
        self._note(part)
        if part == "forward":
            self.activation_bytes = allocated - self._forward_from
        else:
            self._forward_from = allocated
        self._moments += 1
        return self._moments

    def gradients(self, step: Step, gradients: Sequence[Tensor]) -> None:
        """Do nothing: the allocator's counters name no storages."""

    def end(self, step: Step) -> None:
        """Note the peak of the step."""
        torch.cuda.synchronize()
        self._note("optimizer")
        before = torch.cuda.memory_allocated()
        gc.collect()
        step.live_bytes = torch.cuda.memory_allocated()
        step.cyclic_bytes = before - step.live_bytes
        step.peak_bytes = max(self._peaks.values())
        self.peak_phase = next(phase for phase, peak in self._peaks.items() if peak == step.peak_bytes)

    def begin(self) -> int:
        """Begin the peaks of the next step."""
        self._peaks.clear()
        self.reserved_bytes = 0
        self._own["reset_peak_memory_stats"]()
        self._forward_from = torch.cuda.memory_allocated()
        return self._moments

    def names(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return no names: the allocator's counters have none."""
        return set()

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is not in the device's memory."""
        return all(storage.device.type != "cuda" for storage in footprint.storages([tensor]))
