"""A training script that runs for real on this machine's CPU, while it believes in a CUDA card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ContextDecorator, ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from actbench.device.card import believed
from actbench.device.patches import replaced
from actbench.errors import MeasurementError
from actbench.machine import available_memory_bytes
from actbench.measuring.meters import footprint
from actbench.measuring.meters.meter import allocation_failures
from actbench.measuring.meters.peak import alive
from actbench.measuring.meters.stepevents import UNKNOWN
from actbench.model.advice import Settings
from actbench.model.measured import Measurement
from actbench.scheme import Scheme
from actbench.tools.script.allocations import Allocations, RealMemory
from actbench.tools.script.card.facade import card_is_the_cpu
from actbench.tools.script.libraries.libraries import prepared_for_real
from actbench.tools.script.libraries.loggers import together
from actbench.tools.script.steps import reading
from actbench.tools.script.steps.batches import Batches
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.events import Bytes
from actbench.tools.script.steps.growth import with_growth
from actbench.tools.script.steps.keepers import Keepers
from actbench.tools.script.steps.reading import Held
from actbench.tools.script.steps.remarks import about_steps
from actbench.tools.script.steps.schemes import Applied
from actbench.tools.script.steps.steps import Steps
from actbench.tools.script.steps.untrained import Untrained
from actbench.tools.script.timed import TIMED, TimedRun
from actbench.tools.script.values.tensors import storages_addressed
from actbench.tools.script.whole import Whole

_SETTINGS = Settings(batch="a smaller batch in the script")


class RealRun(TimedRun):
    """Runs the training steps inside its block on the CPU, with real tensors, and reads torch's allocator.

    A move to ``cuda`` is one to the CPU, and tensors say ``cpu``. All bytes that torch's allocator has for the script
    count, batches and data sets too, and those of weights, gradients and optimizer state from elsewhere.

    The block ends by itself after two equal steps in a row, or after ``steps`` steps, and a few that are only timed.

    Args:
        memory_limit_bytes: Memory that may be used; None for what is available now.
        scheme: Changes the models after the first step.
        batch_size: Rows of a batch in place of those of the script's DataLoader; None for its own.
        needs_batches: Whether a script that trains without a DataLoader is refused when its first step has ended.
        whole: Whether the script runs to its end, and all parts of its run are measured.
        options: Those of :class:`~actbench.tools.script.timed.TimedRun`.
    """

    def __init__(
        self,
        *,
        memory_limit_bytes: int | None = None,
        scheme: Scheme | None = None,
        batch_size: int | None = None,
        needs_batches: bool = False,
        whole: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.memory_bytes = memory_limit_bytes or available_memory_bytes()
        self.notes: dict[str, None] = {}
        self._applied = None if scheme is None else Applied(scheme)
        self._has_state = self._applied is not None and self._applied.keeps_state
        self._began = 1 if scheme is None else 2  # steps until one has begun with optimizer state
        self._batches = Batches(batch_size, are_needed=needs_batches)
        self._allocations = Allocations(self._held_tensors)
        self.steps = Steps(self._allocations, self._ended)
        self.lines.fed, self.steps.models = self._batches.fed, lambda: self.lines.roots
        self._whole = Whole(self.steps, self.lines.line, self._began, is_cut=False, note=self._note) if whole else None
        self._held: Held | None = None
        self._of_largest: Held | None = None  # a later step may hold other state, as after a resume
        self._untrained = Untrained(self.steps, self.lines, self._holds)
        self._keepers = Keepers(self._allocations, self.lines)
        self._begun_at: float | None = None
        self._seconds: list[float] = []

    def __enter__(self) -> Self:
        counters = RealMemory(self._allocations, self.memory_bytes)
        with ExitStack() as stack:
            stack.enter_context(allocation_failures("the CPU", self.memory_bytes, settings=_SETTINGS))
            stack.enter_context(believed(counters, self._note))
            stack.enter_context(card_is_the_cpu())
            stack.enter_context(storages_addressed())  # a simulation before this run may have left some
            ordered = None if self._whole is None else self._whole.ordered
            stack.enter_context(prepared_for_real(self._note, **self._batches.loading, ordered=ordered))
            for owner in (torch.autograd.profiler, torch.profiler):
                stack.enter_context(replaced(owner, "record_function", lambda own: _NoScope))
            stack.enter_context(self.lines.watching())
            stack.enter_context(self.steps.followed())
            self.lines.ran = self._ran
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
        for text in about_steps(self.steps, self._began, has_state=self._has_state, whole=self._whole is not None):
            self._note(text)
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
        made, of_model = self._allocations, self._held.of_model

        def grown(steps: Sequence[Step]) -> Measurement:
            return with_growth(found, steps, made.events, made.origins, of_model, self._keepers.found)

        if self._whole is None:
            found = grown(self.steps.steady(self._began))
        else:
            seen = Bytes(made.events, (), self.memory_bytes)
            found = self._whole.told(grown, seen)
        found = found.model_copy(update={"step_seconds": tuple(self._seconds[:TIMED]) or None})
        return found if self._applied is None else self._applied.told(found, len(self.steps.done))

    def _finish(self) -> None:
        super()._finish()
        # nothing was traced after --steps
        if self._whole is not None and self._held is not None and not self.ending.has_begun:
            self._whole.finish()

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _holds(self) -> Held:
        return reading.held(self._allocations, self.lines, self.steps.optimizers)

    def _has_run(self) -> bool:
        return self._untrained.held is not None

    def _ran(self) -> None:
        self._untrained.ran()
        if self._whole is not None:
            self._whole.ran()

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

    def _hold(self, step: Step) -> None:
        """Note what is held at the end of a step."""
        self._held = self._holds() if self.steps.trains else self._untrained.held
        if self._held is None:
            return
        if self.steps.largest(self._began) is step:
            self._of_largest = self._held
        self._keepers.look(self.steps.done[self._began :], self._allocations.events, self._held.of_model)

    def _ended(self, step: Step) -> None:
        if self._begun_at is not None:
            self._seconds.append(time.perf_counter() - self._begun_at)
        self._batches.refuse_none()
        step.rows = self._batches.of_step()
        if self._allocations.is_on:
            self._hold(step)
            self._stepped(len(self.steps.done), step)
            self._report(step)
            if self._applied is not None and not self._applied.setups:
                self._allocations.begin()
                self._applied.apply(self.lines.roots, optimizers := self.steps.optimizers)
                self.steps.hand_over(optimizers)
            elif self._whole is not None:
                self._whole.step_ended()
                if self._limit is not None and len(self.steps.done) >= self._began - 1 + self._limit:
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
