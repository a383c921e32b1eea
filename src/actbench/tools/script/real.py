"""A training script that runs for real on this machine's CPU, while it believes in a CUDA card."""

from __future__ import annotations

import time
from contextlib import ContextDecorator, ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from actbench.device.card import simulated_device
from actbench.device.patches import replaced
from actbench.errors import MeasurementError
from actbench.machine import available_memory_bytes
from actbench.measuring.meters import footprint
from actbench.measuring.meters.meter import allocation_failures
from actbench.measuring.meters.peak import alive
from actbench.measuring.meters.stepevents import UNKNOWN
from actbench.model.advice import Settings
from actbench.model.measured import Measurement
from actbench.tools.script.allocations import Allocations, RealMemory
from actbench.tools.script.card.facade import card_is_the_cpu
from actbench.tools.script.libraries.libraries import prepared_for_real
from actbench.tools.script.libraries.loggers import together
from actbench.tools.script.observed import ObservedRun
from actbench.tools.script.scriptrun import TIMED
from actbench.tools.script.steps import reading
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.events import Bytes
from actbench.tools.script.steps.steps import Steps
from actbench.tools.script.values.tensors import storages_addressed

_SETTINGS = Settings(batch="a smaller batch in the script")


class RealRun(ObservedRun):
    """Runs the training steps inside its block on the CPU, with real tensors, and reads torch's allocator.

    A move to ``cuda`` is one to the CPU, and tensors say ``cpu``. All bytes that torch's allocator has for the script
    count, batches and data sets too, and those of weights, gradients and optimizer state from elsewhere.

    The block ends by itself after two equal steps in a row, or after ``steps`` steps, and a few that are only timed.

    Args:
        memory_limit_bytes: Memory that may be used; None for what is available now.
        whole: Whether the script runs to its end, and all parts of its run are measured.
        options: Those of :class:`~actbench.tools.script.observed.ObservedRun`.
    """

    def __init__(self, *, memory_limit_bytes: int | None = None, whole: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.memory_bytes = memory_limit_bytes or available_memory_bytes()
        self._allocations = Allocations(self._held_tensors)
        self._observe(Steps(self._allocations, self._ended), self._allocations, whole=whole, is_cut=False)
        self._begun_at: float | None = None
        self._seconds: list[float] = []

    def __enter__(self) -> Self:
        counters = RealMemory(self._allocations, self.memory_bytes)
        with ExitStack() as stack:
            stack.enter_context(allocation_failures("the CPU", self.memory_bytes, settings=_SETTINGS))
            stack.enter_context(simulated_device(counters, self.note))
            stack.enter_context(card_is_the_cpu())
            stack.enter_context(storages_addressed())  # a simulation before this run may have left some
            ordered = None if self._whole is None else self._whole.ordered
            stack.enter_context(prepared_for_real(self.note, **self._batches.loading, ordered=ordered))
            for owner in (torch.autograd.profiler, torch.profiler):
                stack.enter_context(replaced(owner, "record_function", lambda own: _NoScope))
            stack.enter_context(self.lines.watching())
            stack.enter_context(self.steps.followed())
            if self._whole is not None:
                stack.enter_context(self._whole.followed())
            stack.callback(self._allocations.stop)
            self._allocations.start()
            self._stack = stack.pop_all()
        return self

    @property
    def measurement(self) -> Measurement:
        """What was read of the last step; a MeasurementError if no step ended."""
        if self._held is None:
            raise MeasurementError("no training step ended: no optimizer of torch has stepped")
        self._batches.refuse_others()
        step = self.steps.largest(self._began)
        self._note_steps()
        found = reading.measurement(
            step,
            self._of_largest or self._held,
            self._allocations.events[: step.ended],
            origins=self._allocations.origins,
            earlier=self.steps.done,
            memory_bytes=self.memory_bytes,
            trains=self.steps.trains,
            warnings=together(self.notes),
            built=self._batches.built(self._held.models, step, self.steps.peaks(self._began)),
        )
        seen = None if self._whole is None else Bytes(self._allocations.events, (), self.memory_bytes)
        found = self._grown(found, self._held, self._allocations.origins, seen)
        found = found.model_copy(update={"step_seconds": tuple(self._seconds[:TIMED]) or None})
        return found if self._applied is None else self._applied.with_changes(found, len(self.steps.done))

    def _finish(self) -> None:
        super()._finish()
        # nothing was traced after --steps
        if self._whole is not None and self._held is not None and not self.ending.has_begun:
            self._whole.finish()

    def _report(self, step: Step) -> None:
        """Tell who listens of the memory at the end of a step, which is when it is known."""
        if self._live is not None:
            origins = self._allocations.origins
            self._live.follow(limit=lambda: self.memory_bytes, label=lambda name: origins.get(name, UNKNOWN).label)
            held = alive(self._allocations.events[: step.ended])
            self._live.report(step.live_bytes, step.peak_bytes, held.items(), step=len(self.steps.done))

    def _held_tensors(self) -> list[Tensor]:
        weights = [tensor for root in self.lines.roots for tensor in footprint.weights(root)]
        return [*weights, *(each for one in self.steps.optimizers for each in footprint.optimizer_state(one))]

    def _ended(self, step: Step) -> None:
        if self._begun_at is not None:
            self._seconds.append(time.perf_counter() - self._begun_at)
        self._batches.refuse_none()
        step.rows = self._batches.of_step()
        if self._allocations.is_on:
            self._hold(step)
            self._stepped(len(self.steps.done), step)
            self._report(step)
            if self._is_unapplied:
                self._allocations.begin()
                self._apply()
            elif self._whole is not None:
                self._whole.step_ended()
                if self._has_reached(self._limit):
                    self.ending.end(self.lines.roots)
            elif self.steps.are_enough(self._limit, self._began):
                self._allocations.is_on = False
                self.steps.only_timed_from = len(self.steps.done)
            self.steps.renew(self._began)
        if len(self._seconds) >= TIMED:
            self.ending.end(self.lines.roots)
        if not self._allocations.is_on:
            self._begun_at = time.perf_counter()


class _NoScope(ContextDecorator):
    """Stands for ``record_function``: a trace ends in the middle of a step, where no scope may be open."""

    def __init__(self, name: str, args: str | None = None) -> None:
        self.name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass
