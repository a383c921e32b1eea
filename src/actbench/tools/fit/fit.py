"""A whole fit as one call, ``actbench.fit``: check the request, make plans, prove the first, store the simulations."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from actbench.display import Displayed
from actbench.errors import MeasurementError, UsageError, check_argument
from actbench.keywords import check_keywords
from actbench.measuring import meters
from actbench.model.data import Data
from actbench.model.declared import check_model, device_named
from actbench.model.measured import MeasuredRecord
from actbench.model.meters import MeterName
from actbench.model.records import Case, Failure, Optimizer, Record
from actbench.report.sentences import failures
from actbench.report.store import Store
from actbench.report.tables import Table
from actbench.run import runner
from actbench.run.cellprogress import shown_in_cell
from actbench.run.recipes.sections import Planned
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit.answer import Fitted, about_crashed, fitted, nearest, numbered, times
from actbench.tools.fit.budget import BUDGET_SECONDS
from actbench.tools.fit.cache import Shown
from actbench.tools.fit.codegen import pieces_of
from actbench.tools.fit.planner import Planner
from actbench.tools.fit.records import ANY, EXACT, LEVELS, Asked, FitRecord, PlannedStep, Training, is_crash
from actbench.tools.fit.scripts import name_of
from actbench.tools.fit.simulations import Means, Simulations, candidates_of, checked, simulations
from actbench.tools.fit.tables import FIT_TITLE, tables_of
from actbench.units import format_bytes, parse_bytes
from actbench.validation import explain

_OF_USUAL, _OF_SINGLE_CHANGES, _OF_OTHER_WAYS, _OF_FRONTIERS = 0.5, 0.5, 0.5, 0.5
"""Shares of the time that is left: plans are made between other ways and frontiers, and proved at the end."""

_MEASURED = 3  # plans at most, the first
_PROVED = 3  # plans that are simulated whole, the first of the answer
_PROOFS = 4  # how often others take the place of plans that need more than their parts did


@dataclass(frozen=True, repr=False)
class FitResult(Fitted, Displayed):
    """What a fit found: the plans that were simulated or joined, and how.

    Attributes:
        records: Their records, with failures.
        whole: How many simulations of the whole model there were.
        copies: How many of copies with fewer blocks and of smaller models.
        error: The most that a joined peak was off one that was then simulated whole; None if none was.
        counted: What a remark says of these numbers.
        failed: Cases whose simulation crashed, with why.
        cut_short: The sentence that says what the time was too short for; empty if nothing.
        knows_least: Whether the plan that needs least was simulated whole.
        refused: Names of the candidates that the model or the device refused, with the reason.
        kept: What the model brings and no plan changed, each with why.
        path: The results file, if one is kept.
    """

    records: tuple[FitRecord, ...] = ()
    whole: int = 0
    copies: int = 0
    error: float | None = None
    counted: tuple[str, ...] = ()
    failed: Mapping[Case, Failure] = field(default_factory=dict)
    cut_short: str = ""
    knows_least: bool = False
    refused: Mapping[str, Failure] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def crashed(self) -> tuple[str, ...]:
        """Why simulations crashed, each with the scheme before it; if there are any, plans may be missing."""
        return tuple(f"{case.scheme}: {failure.message}" for case, failure in self.failed.items())

    def __repr__(self) -> str:
        found = f"{len(self.plans)} plans, the fastest {self.plans[0]}" if self.plans else f"nothing fits, {self.least}"
        return f"<FitResult for {format_bytes(self.limit_bytes)}: {found}>"

    def drawn(self) -> list[Table]:
        """Return what a notebook shows: the table of plans."""
        return list(tables_of(self, FIT_TITLE))[:1]

    def shown(self, show_code: int, *, verbose: bool) -> Shown:
        """Return what a command shows, with the code of the first plans, and with ``verbose`` why each is refused."""
        verdict = () if self.fits else self._impossible()
        first, *others = tables_of(self, FIT_TITLE, verdict)
        cut_short = (f"{self.cut_short} Faster plans may exist.",) if self.cut_short and self.fits else ()
        plans = [(f"Plan {number}", plan) for number, plan in enumerate(numbered(self), 1)]
        code = pieces_of(plans, show_code if self.fits else 0)
        first = replace(first, lead=(*cut_short, *first.lead, *about_crashed(self.failed, self.path)), code=code)
        remarks = [f"results: {self.path} (tables in the same folder, as .md and .csv)"] if self.path else []
        idle = [name for name, why in self.refused.items() if why.reason == "nothing-converted" and not verbose]
        told = [(name, name, why) for name, why in self.refused.items() if name not in idle]
        remarks += [f"not for this model: {text}" for text in failures(told, ", ".join, in_table=False)]
        remarks += [f"nothing to do in this model (--verbose says why): {', '.join(idle)}"] if idle else []
        return Shown(
            tables=(first, *others),
            code=code,
            counted=self.counted,
            remarks=(*remarks, *self.kept, *([" ".join(verdict)] if verdict else [])),
            is_possible=self.fits,
            records=lambda: self.records,
            is_whole=not (self.cut_short or self.failed),
            path=self.path,
        )

    def _impossible(self) -> tuple[str, ...]:
        """Return the sentences of a fit without a result: the least need, and what to change."""
        if self.cut_short:
            *_, least_found = nearest(self)
            why = f"Nothing found yet within {times(self.max_slowdown)} the exact step's time. {self.cut_short}"
            return why, least_found
        if not self.knows_least or any(map(self.has_room_for, self.tried)):
            return nearest(self)
        least, limit, parts = self.least, self.limit_bytes, self.least.measurement.peak_parts
        of_model = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes if parts else 0
        remedies = ["take a smaller --batch-size or shorter samples"]
        if of_model > limit:  # the model fills the memory by itself
            alone = f"weights, gradients and optimizer state alone are {format_bytes(of_model)} of that"
            remedies = [f"{alone}: take a smaller model or type"]
        need, own = least.need_bytes, profiles.get(self.case.device_profile or profiles.DEFAULT)
        large = [each for each in profiles.profiles() if each.is_cuda and each.rates and each.step_bytes() >= need]
        if limit < need <= own.step_bytes():
            remedies.append("a larger --memory-limit")
        elif large:
            smallest = min(large, key=lambda each: each.memory_bytes).name
            remedies.append(f"--device-profile {smallest}, the smallest card that would do")
        remedies += ["leave out --exact"] if least.record.asked.exact else []
        needs = f"the least that is possible, {least.words}, needs {format_bytes(need)}"
        return (f"Nothing fits in {format_bytes(limit)}: {needs}; {', or '.join(remedies)}.",)


def fit(
    model: str,
    *,
    device_profile: str,
    batch_size: int = 8,
    sequence_length: int | None = None,
    memory_limit: str | int | None = None,
    max_slowdown: float = 2.0,
    exact: bool = False,
    optimizer: Optimizer | None = None,
    schemes: Sequence[str] | None = None,
    output: Path | str | None = None,
    jobs: int | None = None,
    budget_seconds: float | None = BUDGET_SECONDS,
    **case: Any,
) -> FitResult:
    """Plan what to do with each block of a model so that a step fits on a card and is as fast as it can be.

    Nothing is allocated, and the card is not needed: steps are simulated, in processes of their own. For example::

        found = actbench.fit("llama-3.1-8b", device_profile="rtx-4090", batch_size=1, sequence_length=2048)
        plan = found.plans[0]
        print(plan.spec, plan.need_bytes, plan.slowdown, plan.gradient)

        setup = actbench.TrainingSetup(model, loss=loss, make_optimizer=lambda model: AdamW(model.parameters()))
        step = actbench.TrainStep(plan.apply(setup))

    Args:
        model: As on the command line: a known name, ``hf:ORG/NAME``, a local folder, or ``file.py:function``, which
            names the user's own function.
        device_profile: A card that ``actbench devices`` lists with times, or a ``.toml`` file.
        batch_size: Rows of the batch of a step.
        sequence_length: Tokens per sample.
        memory_limit: Memory that a step may use, in bytes or as ``"20GiB"``; unless given, what a CUDA context leaves
            of the card.
        max_slowdown: The most that a plan may take, in multiples of the exact step's estimated time.
        exact: Whether training must equal the exact step's, to rounding.
        optimizer: The exact step's; None is the model's own, or else AdamW.
        schemes: Specifications to choose among, in place of what the schemes say is worth trying.
        output: A folder or ``.jsonl`` file for the simulations, from which a later call goes on; None keeps none.
        jobs: How many cases are simulated at a time; one a core unless given.
        budget_seconds: Seconds after which nothing new is simulated; None sets no limit.
        case: Other fields of :class:`actbench.Case`: ``dtype``, ``autocast``, ``image_size``, ``attention``, ``task``,
            ``scheme`` (what every plan has, such as ``"lora:16"``), ``seed`` and so on.

    Raises:
        UsageError: The device profile does not exist or has no figures of time, a keyword does not exist, or a value
            cannot be.
        SpecError: A scheme does not exist.
        ModelError: The model does not exist.
        MeasurementError: Not even the exact step can be simulated.
        StoreError: The results file is in use, broken or cannot be written.
    """
    own = [name for name in inspect.signature(fit).parameters if name != "case"]
    check_keywords("actbench.fit", case, [*own, *Case.model_fields])
    check_argument(device_profile, str, "fit: device_profile", "the name of a device, or a .toml file")
    check_argument(model, str, "fit", "the specification of a model, such as 'gpt2'")
    device_profile = device_named(device_profile)
    check_model(model)
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    said = {"sequence_length": sequence_length, "memory_limit_bytes": limit, "optimizer": optimizer, **case}
    given = {name: value for name, value in said.items() if value is not None}
    try:
        step = Case.model_validate(
            {"model": model, "device_profile": device_profile, "batch_size": batch_size, **given}
        )
        asked = Asked(max_slowdown=max_slowdown, exact=exact, optimizer=optimizer)
    except ValidationError as error:
        raise UsageError(f"actbench.fit: {'; '.join(explain(error, given, {'': Case}))}") from None
    path = None if output is None else Path(output)
    with shown_in_cell() as told:
        means = Means(path, schemes=schemes, jobs=jobs, budget_seconds=budget_seconds, progress=told)
        return find(step, asked, means)


def find(case: Case, asked: Asked, means: Means, *, measure: bool = False) -> FitResult:
    """Plan what to do with each block of the model of a case: that of the exact step, with what every plan has.

    With ``measure`` the first three plans are measured, too, on the device of this machine: the GPU for a profile of
    one, or else the CPU.

    What is raised is that of :func:`fit`, a UsageError also if machines cannot be reached, and a MeasurementError if
    this machine lacks the device to measure on.
    """
    case, profile = checked(case)
    limit = profile.step_bytes(case.memory_limit_bytes)
    meter = meter_of(profile) if measure else None
    candidates = candidates_of(case, asked, profile, means.schemes)
    with simulations(f"{name_of(case)}-{profile.name}", case, candidates, means) as made:
        planner = made.planner(case, asked, candidates, is_joining=True)
        with made.searching("usual stacks", _OF_USUAL):
            planner.start()
        made.best = lambda: planner.best(limit)
        with made.budget.stoppable():
            _search(planner, made, asked, limit)
        if asked.max_gradient_error is not None:
            _note_errors(planner, made)
        result = _result(planner, made)
        if meter is not None:
            chosen = (result.shortlist() or result.plans)[:_MEASURED]
            records = (*result.records, *made.records(measured_on(meter, chosen, made)))
            found = _fitted(records)
            result = replace(result, records=records, tried=found.tried, on_device=found.on_device)
    return result


def _search(planner: Planner, made: Simulations, asked: Asked, limit: int) -> None:
    """Make plans, and prove the first."""
    levels = (EXACT,) if asked.exact else LEVELS
    with made.searching("usual stacks", _OF_USUAL):
        planner.try_usual()
    with made.searching("single changes", _OF_SINGLE_CHANGES):
        planner.begin()
    if asked.max_gradient_error is None:
        with made.searching("plans"):
            planner.answer(limit, levels)  # before the time may end
    with made.searching("other ways of computing", _OF_OTHER_WAYS):
        planner.look_further(limit)
    if asked.max_gradient_error is not None:
        made.means.progress.doing("measuring errors of gradients on a small copy of the model")
        planner.limit_error(asked.max_gradient_error)
    with made.searching("plans"):
        planner.answer(limit, levels)
    if not made.budget.is_stopped:  # first, as a point of a frontier may replace a plan of the answer
        with made.searching("frontiers of memory and time", _OF_FRONTIERS):
            planner.frontiers((EXACT,) if asked.exact else (EXACT, ANY), asked.max_slowdown)
    with made.searching("proofs"):
        _prove(planner, made, limit, levels)


def _prove(planner: Planner, made: Simulations, limit: int, levels: Sequence[Training]) -> None:
    """Simulate the first plans whole; where one needs more than its parts did, plans are made anew."""
    for _ in range(_PROOFS):
        if planner.space.most_squared_error < math.inf:
            _note_errors(planner, made)
        found = _fitted(_whole_records(planner, made))
        first = numbered(found)[:_PROVED] or [found.least]
        joined = planner.unproved(each.record.case for each in first)
        if not joined or not made.budget.left_seconds:
            return
        made.means.progress.doing("simulating the first plans whole")
        planner.prove(joined)
        planner.answer(limit, levels)


def _note_errors(planner: Planner, made: Simulations) -> None:
    """Store the errors of plans, which were unknown when they were simulated."""
    for found in planner.found:
        record, error = made.store.find(found.case), math.sqrt(planner.space.errors.of(found.plan))
        if record is not None and record.gradient_error != error:
            made.store.append(record.model_copy(update={"gradient_error": error}))


def _whole_records(planner: Planner, made: Simulations) -> tuple[FitRecord, ...]:
    return made.records([case for case in planner.outcomes if case.model == planner.exact.model])


def _fitted(records: Sequence[FitRecord]) -> Fitted:
    """Return the plans of the last request."""
    (found,) = fitted(record.model_copy(update={"earlier": ()}) for record in records)
    return found


def _result(planner: Planner, made: Simulations) -> FitResult:
    records = _whole_records(planner, made)
    found = _fitted(records)
    error = max(map(abs, planner.errors), default=None)
    return FitResult(
        found.exact,
        found.tried,
        records=records,
        whole=made.whole,
        copies=made.copies,
        error=error,
        counted=tuple(made.counted(error)),
        failed=made.crashed,
        cut_short=made.budget.reason,
        knows_least=planner.knows_least and not made.budget.reason,
        refused={
            candidate.name: outcome
            for candidate, outcome in planner.refused.items()
            if isinstance(outcome, Failure) and not is_crash(outcome)
        },
        kept=(*planner.candidates.kept, *planner.space.errors.remarks()),
        path=made.path,
    )


# -- on the device ----------------------------------------------------------------------------------------------------

_VARIANTS = frozenset(("ti", "super", "d", "laptop", "max", "mobile", "nvl", "mig"))
"""Words in a driver's name of a card that make it another card."""


def meter_of(profile: DeviceProfile) -> MeterName:
    """Return the meter for a profile's device.

    Raises:
        MeasurementError: This machine has none, or another card, with whose measurements estimates cannot be compared.
    """
    name: MeterName = "cuda" if profile.is_cuda else "cpu"
    try:
        meters.check_meter(name)
    except MeasurementError:
        raise MeasurementError(
            f"--measure: {profile.name} is a CUDA device, and torch sees none here; leave --measure out, or give the "
            "same command on a machine that has one ('actbench doctor' says what is missing)"
        ) from None
    if profile.is_cuda:
        card, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        is_own = profile.name.endswith(".toml")
        if capability != profile.compute_capability or not (is_own or _is_named(profile.name, card)):
            mine, its = (".".join(map(str, each or ())) for each in (capability, profile.compute_capability))
            raise MeasurementError(
                f"--measure: the card of this machine is {card} (compute capability {mine}), and --device-profile "
                f"{profile.name} is another (compute capability {its}); leave --measure out, "
                "give the same command on a machine that has that card, or name a profile of this one "
                "('actbench devices' lists them, 'actbench calibrate' writes one)"
            )
    return name


def _is_named(profile: str, card: str) -> bool:
    """Return whether a shipped profile has the name of a card: ``a100-40gb`` fits ``NVIDIA A100-SXM4-40GB``.

    A card without its memory in its name fits profiles of any memory.
    """
    wanted, given = (set(re.findall("[a-z0-9]+", name.lower())) for name in (profile, card))
    sizes = {word for word in wanted | given if re.fullmatch("[0-9]+gb", word)}
    if given & sizes and wanted & sizes and not wanted & given & sizes:
        return False
    return wanted - sizes <= given and given & _VARIANTS <= wanted


@dataclass(frozen=True)
class _AsFits:
    """Stores records of measured cases in a file of fits, as what runs cases asks it to."""

    store: Store[FitRecord]
    simulated: dict[Case, PlannedStep]
    path: None = None

    def done(self, case: Data) -> bool:
        return self.store.done(case)

    def failed(self, case: Data) -> bool:
        return self.store.failed(case)

    def find(self, case: Data) -> FitRecord | None:
        return self.store.find(case)

    def append(self, record: MeasuredRecord | FitRecord) -> None:
        """Store a record with the request of the fit and how its plan changes training."""
        beside = self.simulated[record.case].record
        fields = {name: getattr(record, name) for name in Record.model_fields}
        made = FitRecord(**fields, asked=beside.asked, training=beside.training)
        self.store.append(made.after(self.store.find(record.case)))


def measured_on(meter: MeterName, chosen: Sequence[PlannedStep], made: Simulations) -> tuple[Case, ...]:
    """Measure simulated plans that the store has no measurement of, with all memory that was asked for.

    Return the measured cases. What is raised is that of :func:`find`.
    """
    simulated = {plan.case.model_copy(update={"meter": meter}): plan for plan in chosen}
    fits = _AsFits(made.store, simulated)
    if simulated:
        runner.run_plan(
            [Planned(case) for case in simulated],
            fits,
            recipe=chosen[0].record.recipe,
            command=made.means.command,
            timeout_seconds=made.means.timeout_seconds,
            retry_failed=True,  # another program may have used the memory
            progress=made.means.progress,
        )
    for case, plan in simulated.items():
        record = made.store.find(case)
        if record is not None and record.asked != plan.record.asked:  # measured for another request
            fits.append(record)
    return tuple(simulated)
