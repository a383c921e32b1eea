"""The CPU meter: what torch's own allocator hands out, and seconds of the clock."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch

from actbench.measuring.meters import footprint
from actbench.measuring.meters.base import MemoryReading, allocation_failures, moved
from actbench.measuring.meters.peak import Event, Moments
from actbench.ops import hostmemory
from actbench.results.machine import available_memory_bytes
from actbench.results.measured import PeakParts
from actbench.results.records import MeterName
from actbench.setup import Batch, TrainingSetup, TrainStep

_MARK = "actbench.mark."


class AllocationTrace:
    """Records the allocations and frees of torch's CPU allocator inside the block, by torch's profiler.

    Bytes are those asked for, relative to what was alive on entering. Not seen are frees of what was alive before, and
    allocations in threads that torch's operators start for themselves.

    ``events`` are those that were seen, known after leaving.
    """

    def __init__(self) -> None:
        # The profiler's own log lines would stand between ours on stderr; it reads this when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self._marks: dict[str, int] = {}
        self._names: dict[str, dict[int, int]] = {}
        self._curve: list[int] = []
        self.events: list[Event] = []

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

    def events_until(self, mark: str) -> int:
        """Return how many events there were at a mark; known after leaving."""
        return self._marks[mark]

    def peak_at(self, first: str, last: str) -> int:
        """Return after how many events the most bytes between two marks are alive; known after leaving."""
        return max(range(self._marks[first], self._marks[last] + 1), key=self._curve.__getitem__)

    def peak_bytes(self, first: str, last: str) -> int:
        """Return the most bytes alive between two marks; known after leaving."""
        return self._curve[self.peak_at(first, last)]

    def names(self, mark: str, addresses: Iterable[int]) -> set[int]:
        """Return what the storages are called in ``events`` that have these addresses at a mark; after leaving."""
        return {self._names[mark][address] for address in addresses if address in self._names[mark]}

    def _draw_curve(self) -> None:
        """Add up the events by time; ``_curve[i]`` is what is alive after ``i`` of them.

        A free counts only if its allocation was seen. The profiler remembers the address of whatever outlived an
        earlier trace, and takes the free of a later tensor at that address for its free.
        """
        alive: dict[int, Event] = {}
        names = itertools.count()
        self._curve.append(0)
        for event in sorted(self._events(), key=lambda event: event.start_time_ns):
            if event.name == "[memory]":
                change = event.extra_fields
                if change.alloc_size > 0:
                    alive[change.ptr] = (next(names), change.alloc_size)
                    self._enter(alive[change.ptr], change.alloc_size)
                elif change.ptr in alive:
                    name, amount = alive.pop(change.ptr)
                    self._enter((name, 0), -amount)
            elif event.name.startswith(_MARK):
                mark = event.name.removeprefix(_MARK)
                self._marks[mark] = len(self.events)
                self._names[mark] = {address: name for address, (name, _) in alive.items()}

    def _enter(self, event: Event, change: int) -> None:
        self.events.append(event)
        self._curve.append(self._curve[-1] + change)

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
    def active(self, step: TrainStep | None = None) -> Iterator[None]:
        """Report failed allocations as :class:`actbench.errors.OutOfMemoryError`, with the phase of a step."""
        with allocation_failures(_DEVICE, self.memory_bytes, step):
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
            OutOfMemoryError: An allocation failed.
        """
        base = _held_before(step)
        with self.active(step), AllocationTrace() as trace:
            step()
            gc.collect()
            trace.mark("begin")
            marks: list[str] = []
            step.around_forward = partial(_mark_next, trace, marks)
            loss = step.forward()
            trace.mark("forward")
            step.backward(loss)
            gradients = footprint.gradients(step)
            gradients_bytes, gradients_at = footprint.stored_bytes(gradients), footprint.addresses(gradients)
            del gradients
            trace.mark("backward")
            step.around_forward = lambda: None
            step.update()
            trace.mark("end")
            loss = step.loss
        ends = [*map(trace.events_until, marks)]
        forwards = [*zip(ends[::2], ends[1::2], strict=True)]
        moments = Moments(trace.events_until("begin"), forwards, trace.events_until("backward"))
        peak_at = trace.peak_at("begin", "end")
        state_at = footprint.addresses(footprint.optimizer_state(step.optimizer))
        return MemoryReading(
            weights_bytes=footprint.stored_bytes(footprint.weights(step.setup.module)),
            gradients_bytes=gradients_bytes,
            optimizer_bytes=footprint.stored_bytes(footprint.optimizer_state(step.optimizer)),
            activation_bytes=trace.live_bytes("forward") - trace.live_bytes("begin"),
            peak_bytes=sum(base.model_dump().values()) + trace.peak_bytes("begin", "end"),
            peak_phase=moments.phase(peak_at),
            peak_parts=moments.parts(
                trace.events,
                peak_at,
                weights=set(),  # which are there before
                state=trace.names("begin", state_at) | trace.names("end", state_at),
                gradients=trace.names("backward", gradients_at),
                untracked=base,
            ),
            loss=loss.item(),
        ).against(self.memory_bytes)

    def seconds(self, step: TrainStep, steps: int) -> tuple[float, ...]:
        """Run steps and return the wall time of each; an OutOfMemoryError if an allocation failed."""
        taken = []
        with self.active(step):
            for _ in range(steps):
                started = time.perf_counter()
                step()
                taken.append(time.perf_counter() - started)
        return tuple(taken)


def _mark_next(trace: AllocationTrace, marks: list[str]) -> None:
    """Give this moment the next name, and note it in ``marks``."""
    marks.append(f"forward {len(marks)}")
    trace.mark(marks[-1])


def _held_before(step: TrainStep) -> PeakParts:
    """Return what is alive before a step."""
    weights = footprint.stored_bytes(footprint.weights(step.setup.module))
    state = footprint.stored_bytes(footprint.optimizer_state(step.optimizer))
    batch = footprint.stored_bytes(footprint.everything(step)) - weights - state
    return PeakParts(weights_bytes=weights, optimizer_bytes=state, batch_bytes=batch)
