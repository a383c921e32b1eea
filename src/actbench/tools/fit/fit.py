"""A whole fit as one call: check the request, search, store the simulations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actbench import workload as workloads
from actbench.errors import MeasurementError, UsageError
from actbench.machine import machine, now
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure, Optimizer
from actbench.report.sentences import failures
from actbench.report.store import Store
from actbench.run.executor import Machines
from actbench.run.progress import Progress
from actbench.scheme.base import Change
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit import ondevice
from actbench.tools.fit.choice import ADAPTS
from actbench.tools.fit.choices import Choices, Stack, case_of, choices_for, name_of, training_of
from actbench.tools.fit.leftout import EXACT, LEVELS
from actbench.tools.fit.needs import Copies
from actbench.tools.fit.records import Asked, FitRecord, Fitted, Tried, fitted
from actbench.tools.fit.search import Search
from actbench.tools.fit.simulations import Origin, Simulations, simulator
from actbench.tools.fit.tables import FIT_TITLE, FITTED
from actbench.workload.optimizers import same_updates

BUDGET_SECONDS = 120.0

_WAYS: Mapping[Change, str] = {
    "recomputation": "recomputation",
    ADAPTS: "adapters",
    "optimizer": "another optimizer",
}
"""Changes without which little can be said to fit nowhere, with what people call them."""


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        found: The simulated stacks, beside the exact step.
        records: Their records, with failures.
        simulated: How many were simulated now; the others were in the results file.
        explored: How many stacks were only simulated on copies of the model with a few of its blocks, now or before.
        untried: Stacks for which there was no time, first those that fit as far as the copies tell.
        may_fit: How many of them do.
        unreached: What time ended before any stack with it was simulated: recomputation, adapters, other optimizers.
        refused: Choices that the model or the device refused, with the reason; a reason that they share stands once.
        kept: What the model brings and the search did not change, each with why.
        path: The results file, if one is kept.
        least_profile: The smallest device that some tried stack fits on; None if none is large enough, or if something
            fits on the named device without a limit.
        has_more: Whether more memory than the limit would suffice, and the device has it.
    """

    found: Fitted
    records: tuple[FitRecord, ...]
    simulated: int
    explored: int
    untried: tuple[str, ...]
    may_fit: int
    unreached: tuple[str, ...]
    refused: tuple[str, ...]
    kept: tuple[str, ...]
    path: Path | None
    least_profile: str | None
    has_more: bool

    @property
    def is_possible(self) -> bool:
        """Whether some stack fits and is fast enough."""
        return bool(self.choices)

    @property
    def choices(self) -> list[Tried]:
        """The shortlist of what fits, fastest first, or else the one with adapters; both may be empty."""
        return self.found.shortlist() or self.found.shortlist(adapters=True)


def fit(
    case: Case,
    *,
    asked: Asked | None = None,
    output: Path | None = None,
    command: str = "actbench.fit",
    schemes: Sequence[str] | None = None,
    measure: bool = False,
    jobs: int | None = None,
    budget_seconds: float | None = BUDGET_SECONDS,
    timeout_seconds: float | None = None,
    progress: Progress | None = None,
    machines: Machines | None = None,
) -> Fit:
    """Find which stacks of schemes let a step fit on a device, and which of them are fastest.

    Args:
        case: The exact step: ``meter="simulated"`` and a ``device_profile`` with figures of time.
        asked: What counts as an answer.
        output: A folder, in which ``MODEL-DEVICE/MACHINE.fit.jsonl`` is written; a ``.jsonl`` file; None keeps none.
        command: What the user can type to have the same, for the records.
        schemes: Specifications to choose among, in place of what the schemes say is worth trying.
        measure: Whether the first three stacks are measured, too, on the device of this machine: the GPU for a profile
            of one, or else the CPU.
        jobs: How many of the most promising stacks are simulated before the next are chosen, and on this machine at a
            time; one a core of it unless given.
        budget_seconds: After which nothing new is simulated; None is without end.
        timeout_seconds: That one simulation may take.
        progress: Told what happens.
        machines: Those that simulate, in place of this one.

    Raises:
        UsageError: The device profile does not exist or has no figures of time, or the machines cannot be reached.
        ModelError: The model does not exist.
        MeasurementError: Not even the exact step can be simulated, or this machine lacks the device to measure on.
        StoreError: The results file is in use, broken or cannot be written.
    """
    asked, case, profile, blocks = _checked(case, asked or Asked())
    meter = ondevice.meter_of(profile) if measure else None
    progress = progress or Progress()
    name = f"{case.model}-{profile.name}"

    def make_record(tried: Case, stack: Stack, outcome: Outcome, origin: Origin) -> FitRecord:
        of_copy = tried.model != case.model
        if of_copy and isinstance(outcome, Measurement):
            outcome = outcome.model_copy(update={"sites": ()})  # nobody looks at those of a copy, and they are many
        training = training_of(stack, getattr(outcome, "warnings", ()))
        said = {"recipe": name, "asked": asked, "training": training, "of_copy": of_copy, "recorded_at": now()}
        return FitRecord(case=tried, outcome=outcome, **said, **origin)

    jobs = jobs or machine().cores
    search = Search(
        case,
        case.memory_limit_bytes or profile.memory_bytes,
        _choices(case, asked, profile, schemes),
        max_slowdown=asked.max_slowdown,
        jobs=jobs,
        copies=Copies(case, blocks) if blocks else None,
    )
    libraries = {name for choice in search.choices.all if choice.scheme for name in choice.scheme.card.libraries}
    with FITTED.opened(name, output, of_any_machine=machines is not None and machines.elsewhere) as store:
        with simulator(
            machines,
            jobs=jobs,
            timeout_seconds=timeout_seconds,
            command=command,
            progress=progress,
            libraries=libraries,
        ) as simulates:
            run = Simulations(simulates, store, make_record, progress, jobs=jobs, budget_seconds=budget_seconds)
            search.run(run, (EXACT,) if asked.exact else LEVELS)
        tried = [case_of(stack, case) for stack in search.outcomes]
        result = _result(search, _records(store, tried), run, store.path if output is not None else None)
        if meter is not None:
            chosen = [each.record for each in result.choices[: ondevice.MOST]]
            measured = ondevice.measure(
                chosen, meter, store, command=command, timeout_seconds=timeout_seconds, progress=progress
            )
            records = _records(store, [*tried, *measured])
            result = replace(result, records=records, found=fitted(records)[0])
        if output is not None:
            FITTED.write_beside(store.path, store.records, FIT_TITLE)
        return result


def _records(store: Store[FitRecord], cases: Iterable[Case]) -> tuple[FitRecord, ...]:
    return tuple(record for case in cases if (record := store.find(case)) is not None)


def _checked(case: Case, asked: Asked) -> tuple[Asked, Case, DeviceProfile, int | None]:
    """Return the request with its optimizer, the case of the exact step, the device profile, and the model's blocks."""
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
    if profile.rates is None:
        raise UsageError(
            f"--device-profile {profile.name}: its speed is unknown, so that no time can be estimated; name another "
            "card ('actbench devices')"
        )
    limit = case.memory_limit_bytes or profile.memory_bytes
    settings = {
        "scheme": "exact",
        "meter": "simulated",
        "device_profile": profile.name,
        "memory_limit_bytes": limit,
        "find_largest_batch": False,
        "gradient_quality": False,
    }
    case = case.model_copy(update=settings)
    blocks = getattr(workloads.load_workload(case), "equal_blocks", None)
    return asked.model_copy(update={"optimizer": case.optimizer}), case, profile, blocks


def _choices(case: Case, asked: Asked, profile: DeviceProfile, names: Sequence[str] | None) -> Choices:
    optimizers: dict[Optimizer, bool] = dict.fromkeys(asked.others, False)
    optimizers |= dict.fromkeys(same_updates(case.optimizer), True)  # of AdamW, if the model brings its own
    has_bfloat16 = profile.has_tensor_float or not profile.is_cuda
    return choices_for(case, optimizers, only_exact=asked.exact, names=names, has_bfloat16=has_bfloat16)


def _result(search: Search, records: tuple[FitRecord, ...], run: Simulations, path: Path | None) -> Fit:
    exact = search.outcomes.get(frozenset())
    if isinstance(exact, Failure):
        raise MeasurementError(f"the exact step cannot be simulated: {exact.message}")
    found = fitted(records)
    if not found:
        raise MeasurementError("the time was over before the exact step was simulated: give a larger --budget")
    alone = {name_of(stack): outcome for stack, outcome in search.seen.items() if len(stack) < 2}
    refused = failures(((name, name, outcome) for name, outcome in alone.items()), ", ".join)
    unreached = [
        word
        for change, word in _WAYS.items()
        if _changing(search.untried, change) and not _changing(search.seen, change)
    ]
    untried = sorted(search.untried, key=search.seems_to_fit, reverse=True)
    may_fit = sum(map(search.seems_to_fit, untried))
    need = min(each.need_bytes for each in found[0].tried)
    has_more = search.limit < need <= profiles.get(found[0].case.device_profile or profiles.DEFAULT).memory_bytes
    large = [each for each in profiles.profiles() if each.is_cuda and each.memory_bytes >= need]
    least = None if has_more or not large else min(large, key=lambda each: each.memory_bytes).name
    explored = len(search.explored.keys() & search.predictions.known.keys() - search.outcomes.keys())
    names = tuple(map(name_of, untried))
    return Fit(
        found[0],
        records,
        run.simulated,
        explored,
        names,
        may_fit,
        tuple(unreached),
        tuple(refused),
        search.choices.kept,
        path,
        least,
        has_more,
    )


def _changing(stacks: Iterable[Stack], change: Change) -> bool:
    return any(change in choice.changes for stack in stacks for choice in stack)
