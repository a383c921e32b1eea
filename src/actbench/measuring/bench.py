"""Measures one case: workload, scheme and meter meet here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from actbench import errors, scheme as schemes, workload as workloads
from actbench.errors import IdleError, MeasurementError, UntraceableError, UsageError, boundary, is_out_of_memory
from actbench.measuring import inspection, meters
from actbench.measuring.failures import failure_of as failure_of  # a bench has it
from actbench.measuring.gradients import Gradients, gradients_of, relative_error_and_cosine
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.processgroup import ProcessGroup, batch_seed, leave_fake_group
from actbench.measuring.ranks import process_group_of
from actbench.measuring.search import LARGEST_TRIED
from actbench.model.ledger import Ledger
from actbench.model.measured import Diagnostic, Measurement, Mesh
from actbench.model.records import Built, Case
from actbench.packing.determinism import deterministic_bits
from actbench.scheme.composed import at_parameters, at_placement, parts_in
from actbench.scheme.conditions import Limits, Processes
from actbench.scheme.facets import Adaptive, Diagnosed, Spread
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.overrides import without_dropout
from actbench.simulator.search import Tried, largest_batch
from actbench.simulator.simulated import SimulatedMeter
from actbench.workload.generation import GenerationStep

Found = TypeVar("Found")


class Session:
    """One case measured in this process; ``timeline`` adds its memory over the step.

    ``world`` is the processes that measure it together, this one included; by default those of its process group.

    Attributes:
        tried: Told of each trial of a simulated search for the largest batch.
        said: Told of what the user should know.

    Raises:
        ActbenchError: The case cannot be built here; :func:`failure_of` makes the record's failure.
    """

    _inspects: bool = True

    def __init__(self, case: Case, *, timeline: bool = False, world: ProcessGroup | None = None) -> None:
        self.case = case
        self._wants_timeline = timeline
        self.tried: Tried = lambda batch_size, fits: None
        self.note: Callable[[str], object] = lambda text: None
        self.scheme = schemes.build(case.scheme)
        self.meter = meters.open_meter(case)
        limits, self._spread = self.scheme.facet(Limits), self.scheme.facet(Spread)
        if limits and limits.unsimulated and not self.meter.materialize:
            why = f"{limits.unsimulated}; measure it with --meter cpu or --meter cuda"
            raise MeasurementError(f"scheme {case.scheme!r} is not simulated: {why}")
        self._processes = world or process_group_of(self.scheme, self.meter)
        self.workload = workloads.load_workload(case)
        with self._on_device():
            self._build()

    def _build(self) -> None:
        """Build the model, apply the scheme, and find out what it changes."""
        self._mesh = self._processes.mesh(self.scheme, self.meter)
        self._batch_seed = batch_seed(self.case.seed, self._mesh)
        self._warm = False
        self._step: TrainStep | None = None
        exact = self._exact()
        self._built = exact.built or Built(model_class=type(exact.module).__name__)
        self._warnings: tuple[str, ...] = ()
        before = self._trace(exact) if self.scheme.changes and self._inspects else None
        changing, self._others = at_parameters(self.scheme)
        start = exact if changing is None else changing.apply(exact)
        self._exact_gradient = _if_it_fits(lambda: self._gradient(start)) if self._wants_gradient_quality else None
        self._exact_gradient = self._processes.mean(self._exact_gradient, start.module, self._mesh)
        local, placing = (None, None) if self._others is None else at_placement(self._others)
        self.setup = start if local is None else local.apply(start)
        hides = self.setup.limits.untraceable and not self.meter.materialize
        after = self._trace(self.setup) if before is not None and not hides else None
        self.setup = self.setup if placing is None else placing.apply(self.setup)
        self.sites, self.unreached = self.setup.sites, self.setup.unreached
        if before is not None and after is not None:
            self._inspect(before, after)

    def _on_device(self) -> AbstractContextManager[None]:
        """Let what is built and run be on the simulated device; a real one needs nothing."""
        return nullcontext() if self.meter.materialize else self.meter.operators()

    @deterministic_bits()
    def memory(self) -> Measurement:
        """Read everything but time: bytes, sites, gradient quality and, if requested, the largest batch.

        Raises:
            OutOfMemoryError: The step cannot run: an allocation failed.
        """
        with self._on_device():
            return self._memory()

    def _memory(self) -> Measurement:
        quality, warnings = self._gradient_quality()
        step = self._new_step(self.case.batch_size)
        watch = meters.Watch(step) if self._wants_timeline else None
        with self._processes.sync_allocations():
            reading = self._read(step, watch)
        searched, seconds = None, self.meter.pass_seconds() if isinstance(self.meter, SimulatedMeter) else ()
        if self.case.find_largest_batch and isinstance(self.meter, SimulatedMeter):
            searched = largest_batch(self.meter, self._new_step, self.case.batch_size, reading, self.tried)
        if isinstance(step, GenerationStep):
            longest = self._longest_prompt() if searched else None
            reading = reading.of_generation(step.cache_bytes, longest, seconds)
        shown = tuple(warning for part in self.setup.parts for warning in part.after())
        return Measurement(
            **vars(reading),
            **quality,
            largest_batch=searched and searched.batch_size,
            largest_batch_search=searched,
            mesh=Mesh(**self._spread.axes) if self._spread else None,
            dtype=meters.types(self.setup.module),
            optimizer=step.optimizer_class,
            weights_origin=self.workload.weights_origin,
            built=self._built,
            sites=self.sites,
            unreached=self.unreached,
            warnings=self.workload.warnings + self.setup.warnings + self._warnings + warnings + step.warnings + shown,
            timeline=watch and watch.timeline(),
        )

    @deterministic_bits()
    def snapshot(self) -> bytes:
        """Run the step, and return its snapshot for torch's memory visualiser; an OutOfMemoryError if it cannot run."""
        with self._on_device():
            return meters.pickled(self.meter.snapshot(self._new_step(self.case.batch_size)))

    def time(self, steps: int) -> tuple[float, ...] | None:
        """Run timed steps, after a warm-up in the first call; return their seconds, or None without a clock."""
        if not self.meter.materialize:
            return None
        together = self._processes.starts(self._mesh)
        if self._step is None:
            self._step = self._new_step(self.case.batch_size)
        if not self._warm:
            with deterministic_bits():
                self.meter.seconds(self._step, self.case.warmup_steps, together)
            self._warm = True
        return self.meter.seconds(self._step, steps, together)

    @property
    def _wants_gradient_quality(self) -> bool:
        """Whether gradients can be compared: not those of other parameters than the exact model's, or of parts."""
        compared = self.case.scheme != "exact" and self._others is not None
        compared = compared and not (self._spread and self._spread.of_layers)
        return self.case.gradient_quality and self.meter.materialize and compared

    def _exact(self) -> TrainingSetup:
        torch.manual_seed(self.case.seed)
        exact = self.workload.setup(materialize=self.meter.materialize, seed=self.case.seed)
        return replace(self.meter.adopt(exact), processes=Processes(self._mesh))

    def _read(self, step: TrainStep, watch: meters.Watch | None) -> meters.MemoryReading:
        return self.meter.memory(step, watch)

    def _new_step(self, batch_size: int) -> TrainStep:
        with self.meter.active():
            batch = self.meter.place(self.workload.batch(batch_size, seed=self._batch_seed))
            if self.case.generate is None:
                return TrainStep(self.setup, batch)
            return GenerationStep(self.setup, batch, self.case, whole=self.meter.materialize)

    def _longest_prompt(self) -> int:
        """Return the longest prompt with which the case's generation fits."""
        assert isinstance(self.meter, SimulatedMeter)
        assert self.case.generate is not None

        def of(tokens: int) -> TrainStep:
            step = self._new_step(self.case.batch_size)
            with self.meter.active():
                ids = step.batch["input_ids"]
                step.batch = {"input_ids": ids.new_zeros(len(ids), tokens)}
            return step

        most = LARGEST_TRIED if self.workload.longest is None else self.workload.longest - self.case.generate
        given = self._built.sequence_length or 1
        reading = self.meter.memory(of(given))  # a search begins at the step that the meter has read last
        return largest_batch(self.meter, of, given, reading, lambda size, fits: None, most).batch_size

    def _trace(self, setup: TrainingSetup) -> inspection.Trace | None:
        """Return what the modules of a setup save; None, with a warning, for a real model that needs values."""
        try:
            with self.meter.operators():
                return inspection.trace(setup, self._batch)
        except UntraceableError as error:
            if not self.meter.materialize:
                raise
            self._warnings = (f"the bytes that each site saves are unknown: {error}",)
            return None

    def _inspect(self, before: inspection.Trace, after: inspection.Trace) -> None:
        try:
            self.sites, self.unreached = inspection.inspect(before, after, self.setup)
        except IdleError as idle:
            if not self.case.find_largest_batch:
                raise
            self._warnings = (f"at a batch of {self.case.batch_size}, {idle}",)  # the scheme may act at the largest

    def _gradient(self, setup: TrainingSetup, passes: int = 1) -> Gradients:
        """Return the gradient of the last of ``passes`` passes over the case's batch."""
        draws_equal = all(part.card.draws_alike for part in parts_in(self.scheme))
        with self.meter.active(), nullcontext() if draws_equal else without_dropout(setup.module):
            for _ in range(passes - 1):
                gradients_of(setup, self._batch(), self.case.seed)
            return gradients_of(setup, self._batch(), self.case.seed)

    def _judged_gradient(self) -> Gradients:
        """Return the gradient of a step in the steady state: with allocated bits, and weights as after a step."""
        torch.manual_seed(self.case.seed)
        adaptive = self.scheme.facet(Adaptive) or Adaptive()
        with self.meter.active(), adaptive.as_after_a_step(self.setup):
            return self._gradient(self.setup, passes=2 if adaptive.by_first_step else 1)

    def _diagnostics(self) -> tuple[Diagnostic, ...]:
        diagnosed = self.scheme.facet(Diagnosed) or Diagnosed()
        with self.meter.active():
            return diagnosed.of(self.setup, self._batch(), self.case.seed)

    def _gradient_quality(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the measurement's fields about the gradient, and warnings."""
        if not self._wants_gradient_quality:
            return {}, ()
        exact, self._exact_gradient = self._exact_gradient, None
        alone = not self._processes.are_real  # else the others wait for the step to go on
        found = None
        if exact is not None:
            found = _if_it_fits(self._judged_gradient) if alone else self._judged_gradient()
            found = self._processes.whole(found, self.setup.module)
        if exact is None or found is None:
            return {}, ("gradient quality is unknown: the exact step does not fit in memory with the scheme's",)
        quality = dict(zip(("gradient_error", "gradient_cosine"), relative_error_and_cosine(found, exact), strict=True))
        del found, exact
        diagnostics = _if_it_fits(self._diagnostics)
        if diagnostics is None:
            return quality, ("the variance of the gradient is unknown: the exact step does not fit in memory",)
        return {**quality, "diagnostics": diagnostics}, ()

    def _batch(self) -> Batch:
        return self.meter.place(self.workload.batch(self.case.batch_size, seed=self._batch_seed))


class Trial(Session):
    """A case whose memory alone is measured, to find out whether it fits."""

    _inspects = False

    def _read(self, step: TrainStep, watch: meters.Watch | None) -> meters.MemoryReading:
        """Read the step, on a CPU after a first run of a small part of the batch: large steps take minutes there."""
        size = max(2, self.case.batch_size // 8)  # batch normalization refuses a single value
        if not isinstance(self.meter, CpuMeter) or size >= self.case.batch_size:
            return super()._read(step, watch)
        with self.meter.active():
            first = self.meter.place(self.workload.batch(size, seed=self._batch_seed))
        return self.meter.memory(step, watch, first=first)


def _if_it_fits(compute: Callable[[], Found]) -> Found | None:
    """Return the result of a function, or None if memory runs out."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


@leave_fake_group()
def measure(case: Case, *, timeline: bool = False) -> Measurement:
    """Measure a case in this process: first bytes, then time in a separate pass.

    With ``timeline`` the measurement has the memory over the step (:class:`actbench.model.timeline.Timeline`).

    Raises:
        ActbenchError: The case cannot be measured; see :func:`failure_of`.
        UsageError: The case asks for the largest batch on a real device, which needs separate processes.
    """
    errors.check_argument(case, Case, "measure", "an actbench.Case")
    if case.find_largest_batch and case.meter != "simulated":
        raise UsageError("measure cannot search for the largest batch on a device: use 'actbench sweep --max-batch'")
    session = Session(case, timeline=timeline)
    measurement = session.memory()
    seconds: list[float] = []
    while len(seconds) < case.min_steps or sum(seconds) < case.min_seconds:
        more = session.time(case.min_steps)
        if more is None:
            return measurement
        seconds.extend(more)
    return measurement.model_copy(update={"step_seconds": tuple(seconds)})


@leave_fake_group()
def snapshot(case: Case) -> bytes:
    """Return a snapshot of a step of a case for torch's memory visualiser (pytorch.org/memory_viz), as a pickle.

    actbench itself unpickles nothing.

    Raises:
        ActbenchError: The case cannot be run; see :func:`failure_of`.
    """
    return Session(case.model_copy(update={"gradient_quality": False})).snapshot()


@leave_fake_group()
def itemize(case: Case) -> Ledger:
    """List every tensor that the training step of a case saves for backward, with the operators of its meter's device.

    Nothing is computed and no weights are loaded. Timing and memory limit of the case have no effect.

    Raises:
        ActbenchError: The case cannot be built here; see :func:`failure_of`.
    """
    scheme, meter, workload = schemes.build(case.scheme), meters.open_meter(case), workloads.load_workload(case)
    with boundary(f"model {case.model!r} cannot be built"):
        setup = workload.setup(materialize=False, seed=case.seed)
    with meter.operators():
        if not meter.materialize:
            setup = meter.adopt(setup)
        local, _ = at_placement(scheme)  # a tensor that is saved is saved by each process
        if local is not None and local.facet(Spread):
            setup = replace(setup, processes=Processes(process_group_of(scheme, meter).mesh(scheme, meter)))
        with boundary(f"{case.scheme} cannot be applied to {case.model!r}"):
            setup = setup if local is None else local.apply(setup)
        with boundary(f"a training step of {case.model!r} fails"):
            return inspection.itemize(setup, lambda: workload.batch(case.batch_size, seed=case.seed))
