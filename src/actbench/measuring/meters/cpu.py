"""The CPU meter: what torch's own allocator hands out, and seconds of the clock."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch

from actbench.measuring.meters import footprint
from actbench.measuring.meters.base import MemoryReading, allocation_failures, check_limit, moved
from actbench.ops import hostmemory
from actbench.results.machine import available_memory_bytes
from actbench.results.records import MeterName
from actbench.setup import Batch, TrainingSetup, TrainStep

_MARK = "actbench.mark."


class AllocationTrace:
    """Records the allocations and frees of torch's CPU allocator inside the block, by torch's profiler.

    Bytes are those asked for, relative to what was alive on entering. Not seen are frees of what was alive before, and
    allocations in threads that torch's operators start for themselves.
    """

    def __init__(self) -> None:
        # The profiler's own log lines would stand between ours on stderr; it reads this when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self._marks: dict[str, int] = {}
        self._curve: list[int] = []

    def __enter__(self) -> AllocationTrace:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._draw_curve()

    def mark(self, name: str) -> None:
        """Give this moment a name, once."""
        with torch.profiler.record_function(_MARK + name):
            pass

    def live_bytes(self, mark: str) -> int:
        """Return the bytes alive at a mark; known after leaving."""
        return self._curve[self._marks[mark]]

    def peak_bytes(self, first: str, last: str) -> int:
        """Return the most bytes alive between two marks; known after leaving."""
        return max(self._curve[self._marks[first] : self._marks[last] + 1])

    def _draw_curve(self) -> None:
        """Add up the events by time; ``_curve[i]`` is what is alive after the i-th.

        A free counts only if its allocation was seen. The profiler remembers the address of whatever outlived an
        earlier trace, and takes the free of a later tensor at that address for its free.
        """
        alive: dict[int, int] = {}
        live = 0
        self._curve.append(live)
        for event in sorted(self._events(), key=lambda event: event.start_time_ns):
            if event.name == "[memory]":
                change = event.extra_fields
                if change.alloc_size > 0:
                    alive[change.ptr] = change.alloc_size
                    live += change.alloc_size
                else:
                    live -= alive.pop(change.ptr, 0)
                self._curve.append(live)
            elif event.name.startswith(_MARK):
                self._marks[event.name.removeprefix(_MARK)] = len(self._curve) - 1

    def _events(self) -> Iterator[Any]:
        """Yield the profiler's events, outer ones before what they hold."""
        assert self._profile.kineto_results is not None
        waiting: list[Any] = list(reversed(self._profile.kineto_results.experimental_event_tree()))
        while waiting:
            event = waiting.pop()
            waiting += reversed(event.children)
            yield event


_DEVICE = "the CPU"


class CpuMeter:
    """Reads the allocations of torch's CPU allocator, and the wall clock, in passes of their own.

    Without a memory limit a step may use what is available on this machine now.
    """

    name: MeterName = "cpu"
    materialize = True

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        self.memory_bytes: int = memory_limit_bytes or available_memory_bytes()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Report failed allocations as :class:`actbench.errors.OutOfMemoryError`."""
        with allocation_failures(_DEVICE, self.memory_bytes):
            yield

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this device."""
        return hostmemory.as_the_device()

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to the CPU, in place."""
        setup.module.to("cpu")
        return setup

    def place(self, batch: Batch) -> Batch:
        """Bring the batch to the CPU."""
        return moved(batch, "cpu")

    def memory(self, step: TrainStep) -> MemoryReading:
        """Run the step twice and read the allocator's events of the second run.

        The first run is traced too: what it leaves behind, such as optimizer state, is then known to its last byte.

        Raises:
            OutOfMemoryError: An allocation failed, or the peak is above ``memory_bytes``; the second carries the peak.
        """
        base = footprint.stored_bytes(footprint.everything(step))
        with self.active(), AllocationTrace() as trace:
            step()
            gc.collect()
            trace.mark("begin")
            loss = step.forward()
            trace.mark("forward")
            step.backward(loss)
            gradients_bytes = footprint.stored_bytes(footprint.gradients(step))
            step.update()
            trace.mark("end")
            loss = step.loss
        reading = MemoryReading(
            weights_bytes=footprint.stored_bytes(footprint.weights(step.setup.module)),
            gradients_bytes=gradients_bytes,
            optimizer_bytes=footprint.stored_bytes(footprint.optimizer_state(step.optimizer)),
            activation_bytes=trace.live_bytes("forward") - trace.live_bytes("begin"),
            peak_bytes=base + trace.peak_bytes("begin", "end"),
            loss=loss.item(),
        )
        check_limit(reading.peak_bytes, self.memory_bytes, _DEVICE)
        return reading

    def seconds(self, step: TrainStep, steps: int) -> tuple[float, ...]:
        """Run steps and return the wall time of each; an OutOfMemoryError if an allocation failed."""
        taken = []
        with self.active():
            for _ in range(steps):
                started = time.perf_counter()
                step()
                taken.append(time.perf_counter() - started)
        return tuple(taken)
