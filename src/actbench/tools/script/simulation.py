"""A training script on a card that is not there: what runs inside a simulation believes in the card."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from actbench.device.card import refuse_nested, simulated_device
from actbench.device.patches import interrupts_wait
from actbench.device.works import Works
from actbench.display import Displayed
from actbench.errors import MeasurementError
from actbench.measuring.meters.stepevents import Origin
from actbench.model.measured import Measurement, Remedy, RunEvent
from actbench.model.timeline import Timeline
from actbench.ops.simulation import repeated_by
from actbench.report.render import markdown
from actbench.report.tables import Table
from actbench.simulator import known, profiles
from actbench.simulator.cachingmode import tensors_of
from actbench.simulator.card import simulated
from actbench.simulator.cost.clock import communication, estimate
from actbench.simulator.cost.recorder import Recorder
from actbench.simulator.cublas import Workspaces
from actbench.simulator.fake import LargeAreFake, fakes_accepted
from actbench.simulator.places import is_on_card
from actbench.simulator.reserved import reserved_bytes as reserved
from actbench.simulator.tracker import CheckedTracker, OnCard, StorageTracker
from actbench.simulator.unmodelled import Unmodelled
from actbench.tools.script.ahead import Ahead
from actbench.tools.script.answers import remedies
from actbench.tools.script.answers.tables import script_tables
from actbench.tools.script.card import sensors
from actbench.tools.script.card.customops import RealForms
from actbench.tools.script.card.facade import card_is_the_cpu
from actbench.tools.script.card.memory import CardMemory
from actbench.tools.script.card.parameters import faked_when_registered
from actbench.tools.script.card.threads import threads_followed
from actbench.tools.script.libraries import compiled, kernels, vllm
from actbench.tools.script.libraries.caches import caches_noted
from actbench.tools.script.libraries.importpatches import patch_on_import
from actbench.tools.script.libraries.libraries import prepared
from actbench.tools.script.libraries.loggers import together
from actbench.tools.script.observed import ObservedRun
from actbench.tools.script.processes import groups
from actbench.tools.script.steps import reading, sharing
from actbench.tools.script.steps.blocks import StepBlocks
from actbench.tools.script.steps.counting import Step, Tracked
from actbench.tools.script.steps.events import Bytes
from actbench.tools.script.steps.remarks import Bounds, about_outside
from actbench.tools.script.steps.steps import Ended, Steps
from actbench.tools.script.values.hostrng import GeneratorStates, HostRng
from actbench.tools.script.values.subclasses import subclasses_made
from actbench.tools.script.values.tensors import attributes_shown
from actbench.tools.script.values.values import ScriptMode
from actbench.units import MIB, format_bytes

HOST_INTEGERS_BYTES = 512 * MIB
"""Tensors of integers and booleans in host memory are real up to this size: files of 100 million tokens are read."""

KNOWN_FLOAT_BYTES = 8 * MIB
"""Storages of floats that follow from known integers do so too: anchors, but no masks, which would be filled."""

_TO_COPY = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add_.Tensor

_UNTIMED = "No step time is estimated: the speed of {} is unknown; 'actbench devices' marks cards with times est."


class Simulation(ObservedRun, Displayed):
    """Runs the training steps inside its block on fake tensors, on a card that is not there.

    The block ends by itself after two equal steps in a row, or after ``steps`` steps.

    Args:
        profile: The card.
        memory_limit_bytes: Memory that may be used; None for what a CUDA context leaves of the card.
        raise_oom: Whether what does not fit raises ``torch.OutOfMemoryError``, as on the card.
        processes: How many processes train together; this is the first.
        reads_blocks: Whether the measurement tells what each block of the model holds and takes, and has a trace.
        whole: Whether the script runs to its end, and all parts of its run are measured.
        looks_ahead: Whether batches that did not run are looked at when the run ends.
        chosen: The share of elements that are taken to be chosen where only a real run knows which.
        warns: Whether a step that does not fit is a warning when the block has ended.
        own_process: Whether nothing was compiled in this process before.
        drawn: What other processes of the script have drawn of the host's generator.
        options: Those of :class:`~actbench.tools.script.observed.ObservedRun`.
    """

    def __init__(
        self,
        profile: profiles.DeviceProfile,
        *,
        memory_limit_bytes: int | None = None,
        raise_oom: bool = False,
        processes: int = 1,
        reads_blocks: bool = False,
        whole: bool = False,
        looks_ahead: bool = False,
        chosen: float = 1.0,
        warns: bool = False,
        own_process: bool = False,
        drawn: GeneratorStates | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.profile, self._warns = profile, warns
        self.moved: set[int] = set()
        capability = profile.compute_capability
        self._inductor: compiled.Inductor | None = None
        if capability is not None and compiled.is_possible():
            self._inductor = compiled.Inductor(capability, self.lines.calling, is_first=own_process)
        self.bounds = Bounds(self.lines.line)
        self.processes, self._unmodelled = processes, Unmodelled(profile)
        self.recorder = Recorder(lambda: self.steps.phase, all_operators=profile.rates is not None)
        self.tracker: StorageTracker = (CheckedTracker if raise_oom else StorageTracker)(
            rounding=profile.rounding_bytes,
            host_is_free=profile.is_cuda,
            temporaries=self._unmodelled.temporaries,
            workspaces=Workspaces(profile),
            observe=self._observed,
            made=self.lines.made,
        )
        if profile.is_cuda:
            self.tracker.real_form = RealForms(self.note).of
        cards = groups.cards_of_machine(processes, profile)
        self.memory = CardMemory(profile, self.tracker, memory_limit_bytes, cards, raise_oom=raise_oom)
        self._counting = Tracked(self.tracker)
        steps = Steps(self._counting, self._ended, self.recorder)
        self._observe(steps, self.tracker, whole=whole, is_cut=True)
        self._blocks = StepBlocks(self.steps, self.tracker, self.recorder, profile, is_on=reads_blocks)
        self.lines.is_on = self._applied is None  # else the first step, which is without it, counts in no case
        self.lines.is_updating = lambda: self.steps.phase == "optimizer"
        self.steps.passing = self.lines.begin_pass
        self._ahead = Ahead() if looks_ahead else None
        self._works = Works()
        waited = self._works.synchronize
        self._mode = ScriptMode(self.bounds.at_most, self.bounds.share, waited, chosen)
        self._modes = self._mode, LargeAreFake(HOST_INTEGERS_BYTES, HostRng(self.note, drawn).draw)
        self._cached: set[int] = set()
        self._engines: set[int] = set()
        self._accumulated: list[tuple[int, int]] = []
        self._used: dict[int, int] = {}
        self._using: set[int] = set()  # storages that the last operator has read or written
        self._measured: Measurement | None = None
        if self._live is not None:
            self._live.follow(
                where=lambda: (len(self.steps.done) + 1, self.steps.phase),
                limit=lambda: self.memory.limit_bytes,
                label=self.lines.label,
            )

    def __enter__(self) -> Self:
        try:
            with interrupts_wait():
                self._enter()
            return self
        except KeyboardInterrupt:
            self._stack.close()
            raise

    def _enter(self) -> None:
        refuse_nested()
        with ExitStack() as stack:
            stack.enter_context(known.floats_up_to(KNOWN_FLOAT_BYTES))
            stack.enter_context(fakes_accepted())
            stack.enter_context(simulated(self.profile, self.memory, self.note))
            if self._inductor is not None:
                self._inductor.see_into(self._modes[1], self.tracker)
            for mode in self._modes:
                stack.enter_context(mode)
            stack.enter_context(self.tracker)
            if not self.profile.is_cuda:
                stack.enter_context(simulated_device(self.memory, self.note))
            stack.enter_context(threads_followed(self.tracker, self._modes))
            if self.profile.is_cuda:
                stack.enter_context(sensors.answered(self.memory))
            stack.enter_context(groups.joined(self.processes, self.profile, self._note_buckets, self._works))
            stack.enter_context(attributes_shown(self._mode.from_tensor))
            stack.enter_context(subclasses_made())
            if not self.profile.is_cuda:
                stack.enter_context(card_is_the_cpu())
            stack.enter_context(faked_when_registered(self._mode))
            orders = self._whole or self._ahead
            ordered = None if orders is None else orders.ordered
            compiler = kernels.without_compile if self._inductor is None else self._inductor.compiling
            stack.enter_context(
                prepared(self.note, **self._batches.loading, real=self.real, ordered=ordered, compiler=compiler)
            )
            changes, stubs = vllm.parts(self.note, self._note_engine)
            changes |= caches_noted(self._note_cache)
            stack.enter_context(patch_on_import(changes, stubs, lambda package: None))
            stack.enter_context(repeated_by(self.recorder.repeating))
            if not self.profile.is_cuda:
                stack.enter_context(kernels.recurrent_refused())
            stack.enter_context(self.lines.watching())
            stack.enter_context(self._counting.watching())
            stack.enter_context(self.steps.followed())
            if orders is not None:
                stack.enter_context(orders.followed())
            if self._applied is None:
                self.memory.watch(self._restart)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._finish()
        elif not isinstance(error, Ended):
            self._held = None
        try:
            with interrupts_wait():
                self._stack.close()
        except KeyboardInterrupt:
            self._stack.close()  # where it came before the block began
            raise
        self.ending.done()
        self._mode.is_over = True
        if self._warns and isinstance(error, Ended | None) and self._held is not None and not self.fits:
            over, limit = self.measurement.over_limit_bytes or 0, self.measurement.memory_limit_bytes or 0
            told = f"a step does not fit: it needs {format_bytes(over)} more than {format_bytes(limit)} (card.fits)"
            warnings.warn(f"simulated {self.profile.name}: {told}", stacklevel=2)
        return isinstance(error, Ended)

    @contextmanager
    def real(self) -> Iterator[None]:
        """Inside the block, as while data is loaded, what is made is real; what follows from fakes is counted."""
        # what a collator moves to the card is on it
        seen = OnCard(self.tracker, self._modes if self.profile.is_cuda else ())
        with _disable_current_modes(), seen:
            yield

    @property
    def measurement(self) -> Measurement:
        """What was read of the last step; a MeasurementError if no step ended."""
        if self._measured is None:
            if self._held is None:
                raise MeasurementError("no training step ended: is the training loop in the block, and is it reached?")
            if self._whole is not None:
                self._whole.finish()
            self._measured = self._read(self._held)
        return self._measured

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated on the card in a step."""
        return self.measurement.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether a step fits into the memory that it may use."""
        return self.measurement.fits

    def __repr__(self) -> str:
        """Return the card with what is known of the step, if one ended."""
        known = self._measured is not None or self._held is not None
        return f"<simulated {self.profile.name}: {self.measurement.ending if known else 'no step ended'}>"

    def drawn(self) -> list[Measurement | Table | str]:
        """Return what a notebook shows."""
        try:
            found = self.measurement
        except MeasurementError as error:
            return [f"{self.profile.name}: {error}"]
        return [f"A step on a simulated {self.profile.name}:", found, *list(script_tables(found))[-1:]]

    def table(self) -> str:
        """Return the peak by phase, by kind, by line and by module as Markdown."""
        return "\n".join(map(markdown, script_tables(self.measurement)))

    def timeline(self) -> Timeline:
        """Return the memory over the last step, with its holders at the peak."""
        found = self.measurement.timeline
        assert found is not None
        return found

    def _read(self, held: reading.Held) -> Measurement:
        """Return the measurement of the largest step, and of what the scheme changed.

        Raises:
            MeasurementError: No loader of the script made batches of the size that was asked for.
        """
        self._batches.refuse_others()
        profile, estimated, step = self.profile, None, self.steps.largest(self._began)
        of_step = self._of_largest or held
        reserved, seen = self.memory.most_reserved_bytes() if profile.is_cuda else None, None
        if self._whole is not None:
            seen = Bytes(
                self.tracker.events, self.memory.reserved_at if profile.is_cuda else (), self.memory.limit_bytes
            )
            reserved = seen.event("step", step.begun, step.ended).reserved_bytes
        self._note_steps()
        most_bytes = max(self.tracker.peak_bytes, *(each.peak_bytes for each in self.steps.done))
        outside = () if self._whole else about_outside(most_bytes, step.peak_bytes)
        for text in (
            *self.memory.limited(),
            *(outside if self._applied is None else ()),
            *self._works.remarks(),
        ):
            self.note(text)
        if profile.rates is not None and step.done and self.steps.trains:
            shares, passed = profile.efficiencies, self._blocks.passed(step)
            estimated = estimate(step.done, profile.rates, shares, asynchronous=profile.is_cuda, passed=passed)
        built = self._batches.built(held.models, step, self.steps.peaks(self._began))
        found = reading.measurement(
            step,
            of_step,
            self.tracker.events[: step.ended],
            origins={**self.lines.origins, **{name: self.lines.of_gradient(name) for name in step.gradients}},
            communicated=self.tracker.communicated,
            moved=self.moved,
            earlier=self.steps.done,
            workspaces=self.tracker.workspaces,
            cached=self._cached,
            engines=self._engines,
            trains=self.steps.trains,
            memory_bytes=self.memory.limit_bytes,
            warnings=together(self.notes),
            built=built if self._ahead is None else self._ahead.read(built),
            reserved_bytes=reserved,
            estimated=estimated,
            communication=communication(step.done),
            untimed=_UNTIMED.format(profile.name) if profile.rates is None else None,
            simulated="cuda" if profile.is_cuda else "cpu",
            blocks=self._blocks.readings(step),
        )
        found = self._grown(found, held, self.lines.origins, seen)
        found = found.model_copy(
            update={"free_remedies": self._remedies(step, of_step, found.reserved_bytes, found.events)}
        )
        marks = {"at_most": tuple(self.bounds.most), "approximate": (*self.bounds.shares, *self._unmodelled.reasons())}
        if self._applied is None:
            found = found.model_copy(update={"script_peak_bytes": most_bytes})
        found = found.model_copy(update={**marks, "mesh": sharing.mesh(self.processes, held.tensor_parallel)})
        found = found if self._applied is None else self._applied.with_changes(found, len(self.steps.done))
        if self.memory.is_led(step.begun, step.ended):  # a trace says nothing of what the script tells the allocator
            return found
        trace = self._blocks.trace(step, found, of_step.state, expandable=self.memory.grows)
        return found if trace is None else found.model_copy(update={"trace": trace.packed()})

    def _remedies(
        self, step: Step, held: reading.Held, reserved_bytes: int | None, parts: Sequence[RunEvent]
    ) -> tuple[Remedy, ...]:
        if not self.steps.trains:
            return ()
        events, shared = self.tracker.events, self.tracker.communicated
        self._used.update(dict.fromkeys(self._using, len(events)))
        others = held.weights | held.copies | held.state | shared.buffers | shared.gathered
        others |= self._cached | self._engines
        found = remedies.of_step(
            step,
            events,
            origins=self.lines.origins,
            used=None if self._inductor is not None and self._inductor.has_run else self._used,
            accumulated=self._accumulated,
            others=others | self.tracker.workspaces,
        )
        if reserved_bytes is None:
            return found
        if self._whole is not None:
            found += remedies.of_cache(parts, lambda: self._emptied(parts), self._whole.evaluations())
        if self.memory.grows:
            return found
        return found + remedies.of_allocator(
            reserved_bytes,
            step.peak_bytes,
            lambda: reserved(
                [events[: step.ended]], limit_bytes=self.memory.limit_bytes, expandable=True, streams=shared.streams
            ),
        )

    def _emptied(self, parts: Sequence[RunEvent]) -> Sequence[RunEvent]:
        """Return what parts of a whole run need if the allocator's cache is emptied before and after evaluations."""
        assert self._whole is not None
        spans = [(span.begun, span.ended) for span in self._whole.spans() if span.part == "evaluation"]
        at = self.memory.reserved_with(moment for span in spans for moment in span)
        events = self._whole.events(Bytes(self.tracker.events, at, self.memory.limit_bytes))
        # blocks of an evaluation that was cut short are those of its first batches, in both
        return events if len(events) == len(parts) else parts

    def _note_buckets(self, buckets: list[Tensor]) -> None:
        """Note what tensors in which processes average gradients are for, and who made them."""
        names = self.tracker.names(buckets)
        self.tracker.communicated.gathered |= names
        origin = Origin("", "DistributedDataParallel", self.lines.line())
        self.lines.origins.update(dict.fromkeys(names, origin))

    def _note_cache(self, tensors: list[Tensor]) -> None:
        self._cached |= self.tracker.names(tensors)

    def _note_engine(self, tensors: list[Tensor]) -> None:
        """Note tensors that stand for an engine's memory, by the line that started or woke it."""
        names = self.tracker.names(tensors)
        self._engines |= names
        self.lines.origins.update(dict.fromkeys(names, Origin("", "vllm", self.lines.line())))

    def _ended(self, step: Step) -> None:
        if self._measured is not None:
            self.ending.end(self.lines.roots)
        self._batches.refuse_none()
        self._works.end_step()
        step.rows = self._batches.of_step()
        self._hold(step)
        assert self._held is not None
        self._stepped(len(self.steps.done), step)
        if self._live is not None:
            self._live.report(step.live_bytes, step.peak_bytes, self.tracker.storages(), step=len(self.steps.done))
        if self._inductor is None or not self._inductor.has_run:  # compiled code calls no hooks of blocks
            self._blocks.find(self.lines.roots)
        if self._is_unapplied:
            self._apply()
            gc.collect()
            # what the first step reserved is not the scheme's
            self._stack.callback(self.memory.restart(self._held.state))
            self.memory.watch(self._restart)
            self.lines.is_on = True
            return
        if self._is_enough():
            self._measured = self._read(self._held)
            self.ending.end(self.lines.roots)
        self.steps.renew(self._began)

    def _is_enough(self) -> bool:
        """Return whether the run is over, as it is in the step that has just ended."""
        if self._whole is None:
            return self.steps.are_enough(self._limit, self._began)
        self._whole.step_ended()
        if self._limit is not None:
            return self._has_reached(self._limit)
        if self._whole.is_over:
            self.note("the run was ended by its time; --steps N runs N steps, however long they take")
        return self._whole.is_over

    def _observed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.recorder.note(func, args, kwargs, result)
        self.lines.follow((args, kwargs), result, self.tracker.names)
        if func is _TO_COPY and is_on_card(result) and not is_on_card(args[0]):
            self.tracker.add([result], func)
            self.moved |= self.tracker.names([result])
        self._used.update(dict.fromkeys(self._using, len(self.tracker.events)))  # with the results of that operator
        self._using = self.tracker.names(tensors_of((args, kwargs)))
        if func is _ADD and self.steps.phase == "backward":
            self._accumulated += ((name, len(self.tracker.events)) for name in self.tracker.names([args[0]]))

    def _restart(self) -> None:
        self.steps.restart()
        self._held = self._of_largest = None
