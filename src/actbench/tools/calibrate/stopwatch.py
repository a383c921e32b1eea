"""Times each operator that runs, with the work that it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.cost.work import OperatorWork

Clock = Callable[[], float]

_LEAST = 2e-7
_AHEAD_CYCLES, _MOST_CYCLES = 50_000_000, 2_000_000_000
_LARGEST_KEPT = 31 << 20


class Sample(NamedTuple):
    """One run of an operator: its work and its seconds."""

    work: OperatorWork
    seconds: float


class Stopwatch(TorchDispatchMode):
    """Times each operator that runs inside.

    Args:
        device: The device that computes. On CUDA, the time of an operator is that between two events, and the device
            waits first, so that the host runs ahead of it.
        clock: Seconds, for a CPU.

    Attributes:
        samples: Operators that move bytes; known after leaving.
        is_late: Whether the device's wait ended before the host had issued all operators, so that the times are the
            host's. The device waits longer in the next block; False if the wait is already the longest allowed.
        views: Number of operators that move no bytes.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._recorder = Recorder(lambda: None)
        self._taken: list[tuple[Any, Any]] = []
        self._ahead_cycles = _AHEAD_CYCLES
        self.is_late = False
        self.samples: list[Sample] = []
        self.views = 0

    def __enter__(self) -> Stopwatch:
        self._recorder.begin()
        self._taken.clear()
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(self._ahead_cycles)  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

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

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is not None:
            return
        if self._is_cuda:
            # the first event has come although the last was only just issued: the device did not wait for the host
            self.is_late = bool(self._taken) and self._taken[0][0].query() and self._ahead_cycles < _MOST_CYCLES
            if self.is_late:
                self._ahead_cycles = min(4 * self._ahead_cycles, _MOST_CYCLES)
            torch.cuda.synchronize()
        seconds = [begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in self._taken]
        timed = list(zip((done.work for done in self._recorder.done), seconds, strict=True))
        # a view does almost nothing: its time is the overhead of watching
        views = [taken for work, taken in timed if work.kind is None]
        watching = statistics.median(views) if views else 0.0
        self.samples = [Sample(work, max(taken - watching, _LEAST)) for work, taken in timed if work.kind is not None]
        self.views = len(views)


def settle_heap() -> None:
    """Bring the heap of the C library into the state of a process that has trained for a while.

    The C library maps each tensor larger than any freed before, and a mapping costs page faults: 3 ms for 6 MiB, more
    than a layer takes. A freed tensor of up to 32 MiB raises this limit (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # freed at once
