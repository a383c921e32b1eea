"""A whole fit as one call: check the request, make plans, store the simulations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actbench.model.records import Case, Failure
from actbench.report.sentences import failures
from actbench.report.store import Store
from actbench.simulator import profiles
from actbench.tools.fit import ondevice
from actbench.tools.fit.answer import numbered
from actbench.tools.fit.counts import Counts, about_crashed, is_crash
from actbench.tools.fit.fitting import Fitting, Means, checked, choices_of, fitting
from actbench.tools.fit.levels import ANY, EXACT, LEVELS, Level
from actbench.tools.fit.planner import Planner
from actbench.tools.fit.records import Asked, FitRecord, Tried
from actbench.tools.fit.scripts import name_of
from actbench.tools.fit.shortlist import Fitted, fitted

_OF_USUAL, _OF_SINGLE_CHANGES = 0.5, 0.5
"""Shares of the time that is left, for the usual stacks and then for single changes; the rest is for plans."""

_PROVED = 3  # plans that are simulated whole, the first of the answer
_PROOFS = 4  # how often others take the place of plans that need more than their parts did


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        found: The plans that were simulated whole, and the exact step.
        records: Their records, with failures.
        counts: How many simulations there were.
        crashed: Cases whose simulation crashed, with why: plans with what they were of may be missing.
        cut_short: The sentence that says what the time was too short for; empty if nothing.
        knows_least: Whether the plan that needs least was simulated whole.
        refused: Names of the choices that the model or the device refused, with the reason.
        kept: What the model brings and no plan changed, each with why.
        path: The results file, if one is kept.
        least_profile: The smallest device that some plan fits on; None if none is large enough, or if something fits
            on the named device without a limit.
        has_more: Whether more memory than the limit would suffice, and the device has it.
    """

    found: Fitted
    records: tuple[FitRecord, ...]
    counts: Counts
    crashed: Mapping[Case, Failure]
    cut_short: str
    knows_least: bool
    refused: Mapping[str, Failure]
    kept: tuple[str, ...]
    path: Path | None
    least_profile: str | None
    has_more: bool

    def about_refused(self, *, each: bool) -> list[str]:
        """Return the refused choices: with ``each`` every reason, else one sentence on those with nothing to do."""
        idle = [name for name, why in self.refused.items() if why.reason == "nothing-converted" and not each]
        told = [(name, name, why) for name, why in self.refused.items() if name not in idle]
        lines = [f"not for this model: {text}" for text in failures(told, ", ".join, in_table=False)]
        if idle:
            lines.append(f"nothing to do in this model (--verbose says why): {', '.join(idle)}")
        return lines

    @property
    def about_crashed(self) -> tuple[str, ...]:
        """The line that ends the answer if simulations crashed."""
        return about_crashed(self.crashed, self.path)

    @property
    def is_possible(self) -> bool:
        """Whether some plan fits and is fast enough."""
        return bool(self.choices)

    @property
    def choices(self) -> list[Tried]:
        """The shortlist of what fits, fastest first, or else the one with adapters; both may be empty."""
        return self.found.shortlist() or self.found.shortlist(adapters=True)


def fit(case: Case, asked: Asked, means: Means, *, measure: bool = False) -> Fit:
    """Plan what to do with each block of a model so that a step fits on a device and is as fast as it can be.

    Args:
        case: The exact step: ``meter="simulated"``, a ``device_profile`` with figures of time, and the schemes that
            every plan has.
        asked: What counts as an answer.
        means: How plans are made.
        measure: Whether the first three plans are measured, too, on the device of this machine: the GPU for a profile
            of one, or else the CPU.

    Raises:
        UsageError: The device profile does not exist or has no figures of time, or the machines cannot be reached.
        ModelError: The model does not exist.
        MeasurementError: Not even the exact step can be simulated, or this machine lacks the device to measure on.
        StoreError: The results file is in use, broken or cannot be written.
    """
    case, profile = checked(case)
    limit = profile.step_bytes(case.memory_limit_bytes)
    meter = ondevice.meter_of(profile) if measure else None
    progress = means.progress
    choices = choices_of(case, asked, profile, means.schemes)
    with fitting(f"{name_of(case)}-{profile.name}", case, choices, means) as made:
        planner = made.planner(case, asked, choices, is_joining=True)
        with made.searching("usual stacks", _OF_USUAL):
            planner.start()
        made.best = lambda: planner.best(limit)
        with made.budget.stoppable():
            _search(planner, made, asked, limit)
        if asked.max_gradient_error is not None:
            _note_errors(planner, made.store)
        whole = [tried for tried in planner.outcomes if tried.model == case.model]
        result = _result(planner, made.records(whole), made)
        if meter is not None:
            chosen = result.choices[: ondevice.MOST]
            measured = ondevice.measure(
                chosen,
                meter,
                made.store,
                command=means.command,
                timeout_seconds=means.timeout_seconds,
                progress=progress,
            )
            records = made.records([*whole, *measured])
            result = replace(result, records=records, found=_found(records))
    return result


def _search(planner: Planner, made: Fitting, asked: Asked, limit: int) -> None:
    """Make plans, and prove the first."""
    levels = (EXACT,) if asked.exact else LEVELS
    with made.searching("usual stacks", _OF_USUAL):
        planner.try_usual()
    with made.searching("single changes", _OF_SINGLE_CHANGES):
        planner.begin()
    if asked.max_gradient_error is None:
        with made.searching("plans"):
            planner.answer(limit, levels)  # before the time may end
    with made.searching("other ways of computing"):
        planner.look_further()
    if asked.max_gradient_error is not None:
        made.means.progress.doing("measuring errors of gradients on a small copy of the model")
        planner.limit_error(asked.max_gradient_error)
    with made.searching("plans"):
        planner.answer(limit, levels)
    with made.searching("proofs"):
        _prove(planner, made, limit, levels)
    if not made.budget.is_stopped:
        with made.searching("frontiers of memory and time"):
            planner.frontiers((EXACT,) if asked.exact else (EXACT, ANY), asked.max_slowdown)
        with made.searching("proofs"):
            _prove(planner, made, limit, levels)  # of what a point of a frontier has replaced


def _prove(planner: Planner, made: Fitting, limit: int, levels: Sequence[Level]) -> None:
    """Simulate the first plans whole; where one needs more than its parts did, plans are made anew."""
    for _ in range(_PROOFS):
        if planner.most_squared_error < math.inf:
            _note_errors(planner, made.store)
        found = _found(made.records([tried for tried in planner.outcomes if tried.model == planner.exact.model]))
        first = numbered(found)[:_PROVED] or [found.least]
        joined = [each.record.case for each in first if each.record.joined]
        if not joined or not made.budget.left_seconds:
            return
        made.means.progress.doing("simulating the first plans whole")
        planner.prove(joined)
        planner.answer(limit, levels)


def _note_errors(planner: Planner, store: Store[FitRecord]) -> None:
    """Store the errors of plans, which were unknown when they were simulated."""
    for found in planner.found:
        record, error = store.find(found.case), math.sqrt(planner.space.errors.of(found.plan))
        if record is not None and record.gradient_error != error:
            store.append(record.model_copy(update={"gradient_error": error}))


def _found(records: Sequence[FitRecord]) -> Fitted:
    """Return the plans of the last request."""
    (found,) = fitted(record.model_copy(update={"earlier": ()}) for record in records)
    return found


def _result(planner: Planner, records: tuple[FitRecord, ...], made: Fitting) -> Fit:
    found = _found(records)
    need, limit = found.least.need_bytes, found.limit_bytes
    has_more = limit < need <= profiles.get(found.case.device_profile or profiles.DEFAULT).step_bytes()
    large = [each for each in profiles.profiles() if each.is_cuda and each.rates and each.step_bytes() >= need]
    least = None if has_more or not large else min(large, key=lambda each: each.memory_bytes).name
    return Fit(
        found,
        records,
        made.count()._replace(error=max(map(abs, planner.errors), default=None)),
        made.crashed,
        made.budget.told,
        planner.knows_least and not made.budget.told,
        {
            choice.name: outcome
            for choice, outcome in planner.refused.items()
            if isinstance(outcome, Failure) and not is_crash(outcome)
        },
        (*planner.choices.kept, *planner.space.errors.remarks()),
        made.path,
        least,
        has_more,
    )
