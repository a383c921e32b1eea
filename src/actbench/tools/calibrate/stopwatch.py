"""Times each operator that runs, with the work that it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.model.records import Phase
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.cost.work import OperatorWork

Clock = Callable[[], float]

_LEAST = 2e-7
_AHEAD_CYCLES, _MOST_CYCLES = 50_000_000, 2_000_000_000


class Sample(NamedTuple):
    """One run of an operator or a view: the part of the step that ran it, its work and its seconds."""

    phase: Phase
    work: OperatorWork
    seconds: float


class Stopwatch(TorchDispatchMode):
    """Times the operators of a step.

    Args:
        device: The device that computes. On CUDA, the time of an operator is that between two events, and the device
            waits first, so that the host runs ahead of it.
        clock: Seconds, for a CPU.
        phase: Tells which part of the step runs.
    """

    def __init__(
        self, device: torch.device, clock: Clock = time.perf_counter, phase: Callable[[], Phase | None] = lambda: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._recorder = Recorder(phase)
        self._taken: list[tuple[Any, Any]] = []
        self._ahead_cycles = _AHEAD_CYCLES

    def time(self, run: Callable[[], object]) -> list[Sample]:
        """Run a step, and return its operators and views in order.

        It runs again, after a longer wait, if the device's wait ended before the host had issued all operators: such
        times are the host's.
        """
        self._recorder.begin()
        self._taken.clear()
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._ahead_cycles)  # type: ignore[no-untyped-call]
        with self:
            run()
        if self._is_cuda:
            # the first event has come although the last was only just issued: the device did not wait for the host
            is_late = self._taken[0][0].query() and self._ahead_cycles < _MOST_CYCLES
            torch.cuda.synchronize()
            if is_late:
                self._ahead_cycles = min(4 * self._ahead_cycles, _MOST_CYCLES)
                return self.time(run)
        seconds = [begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in self._taken]
        done = self._recorder.done
        # a view does almost nothing: its time is the overhead of watching
        views = [taken for each, taken in zip(done, seconds, strict=True) if each.work.kind is None]
        watching = statistics.median(views) if views else 0.0
        return [
            Sample(each.phase, each.work, max(taken - watching, _LEAST))
            for each, taken in zip(done, seconds, strict=True)
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        begin = self._now()
        result = func(*args, **(kwargs or {}))
        end = self._now()
        self._recorder.note(func, args, kwargs or {}, result)
        if len(self._recorder.done) > len(self._taken):
            self._taken.append((begin, end))
        return result

    def _now(self) -> Any:
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def settle_heap() -> None:
    """Bring the heap of the C library into the state of a process that has trained for a while.

    The C library maps each tensor larger than any freed before, and a mapping costs page faults: 3 ms for 6 MiB, more
    than a layer takes. A freed tensor of up to 32 MiB raises this limit (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # freed at once
