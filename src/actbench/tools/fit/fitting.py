"""What plans are made with: the choices for a case, what simulates it, and the file that keeps every simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from actbench import scheme as schemes
from actbench.errors import UsageError
from actbench.machine import machine, now
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure, Optimizer
from actbench.report.store import Store
from actbench.run.executor import PRELOAD, Machines
from actbench.run.progress import Progress
from actbench.scheme.composed import parts_in
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit import scripts
from actbench.tools.fit.budgets import BUDGET_SECONDS, Budget
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.choices import Choices, choices_for
from actbench.tools.fit.copies import FromCopies
from actbench.tools.fit.counts import Counts
from actbench.tools.fit.plan import Plan, training_of
from actbench.tools.fit.planner import Planner
from actbench.tools.fit.records import Asked, FitRecord
from actbench.tools.fit.simulations import Origin, Simulations, Simulator, simulator
from actbench.tools.fit.tables import FIT_TITLE, FITTED
from actbench.workload.names import parse_model_name
from actbench.workload.optimizers import same_updates


@dataclass(frozen=True)
class Means:
    """How plans are made.

    Attributes:
        output: A folder, in which ``MODEL-DEVICE/MACHINE.fit.jsonl`` is written; a ``.jsonl`` file; None keeps none.
        command: What the user can type to have the same, for the records.
        schemes: Specifications to choose among, in place of what the schemes say is worth trying.
        jobs: How many cases are simulated at a time on this machine; one a core of it unless given.
        budget_seconds: Seconds after which no simulation starts; None sets no limit.
        timeout_seconds: Seconds that one simulation may take.
        progress: Receives what happens.
        machines: The machines that simulate, in place of this one.
    """

    output: Path | None = None
    command: str = "actbench.fit"
    schemes: Sequence[str] | None = None
    jobs: int | None = None
    budget_seconds: float | None = BUDGET_SECONDS
    timeout_seconds: float | None = None
    progress: Progress = field(default_factory=Progress)
    machines: Machines | None = None

    @property
    def jobs_here(self) -> int:
        """How many cases are simulated at a time."""
        return self.jobs or machine().cores


@dataclass
class Fitting:
    """An open results file, and what simulates; several planners may share both.

    Attributes:
        means: How plans are made.
        name: Of the records.
        given: What the user's exact step has, too: plans train as it does.
        store: The results file.
        simulates: What simulates cases.
        stored: Cases that the results file had when it was opened.
        runs: What the planners have simulated.
        budget: The time that the planners share.
        best: Tells the best plan so far; empty if there is none.
    """

    means: Means
    name: str
    given: str
    store: Store[FitRecord]
    simulates: Simulator
    stored: frozenset[Case] = frozenset()
    runs: list[Simulations] = field(default_factory=list)
    budget: Budget = field(init=False)
    best: Callable[[], str] = field(default=lambda: "", repr=False)
    _search: str = field(default="plans", repr=False)
    _planned: list[Case] = field(default_factory=list, repr=False)  # progress counts them, whoever planned them

    def __post_init__(self) -> None:
        """Let the time begin."""
        self.budget = Budget(self.means.budget_seconds)

    @contextmanager
    def searching(self, what: str, share: float = 1.0) -> Iterator[None]:
        """Give a search, named in the plural, a share of the time that is left, and tell how far it is."""
        with self.budget.share(what, share):
            self._search = what
            self._tell()
            yield

    def _tell(self) -> None:
        """Tell how much of the time has passed, and the best plan so far, which Ctrl-C takes."""
        best = f"; best {best}; Ctrl-C takes it" if (best := self.best()) else ""
        self.means.progress.doing(f"trying {self._search}: {self.budget.passed}{best}")

    def planner(self, case: Case, asked: Asked, choices: Choices | None = None, *, is_joining: bool = False) -> Planner:
        """Return a planner of the case of an exact step, which has simulated nothing yet.

        With ``is_joining`` it joins plans from traces; the plans that are told have to be proved then.
        """
        simulations = self.simulations(case, asked)
        changes = choices or self.choices(case, asked)
        if not is_joining:
            return FromCopies(case, changes, simulations, is_joining=False)
        return FromCopies(case, changes, simulations, note=simulations.note)

    def choices(self, case: Case, asked: Asked) -> Choices:
        """Return what may be changed in the case of an exact step."""
        return choices_of(case, asked, profiles.get(case.device_profile or ""), self.means.schemes)

    def simulated(self, case: Case, exact: Case, asked: Asked) -> Outcome | None:
        """Return the outcome of a case without a plan, such as that of an exact step; None if the time is over."""
        return next((outcome for _, outcome in self.simulations(exact, asked)({case: Plan()})), None)

    def simulations(self, case: Case, asked: Asked) -> Simulations:
        """Return an object that gives outcomes of cases which differ only by their plans from that of an exact step."""
        asked = asked.model_copy(
            update={"optimizer": case.optimizer, "scheme": case.scheme, "limit_bytes": case.memory_limit_bytes}
        )
        self.runs.append(
            Simulations(
                self.simulates,
                self.store,
                partial(self._record, case, asked),
                self.means.progress,
                jobs=self.means.jobs_here,
                budget=self.budget,
                planned=self._planned,
                told=self._tell,
                command=self.means.command,
            )
        )
        return self.runs[-1]

    def records(self, cases: Sequence[Case]) -> tuple[FitRecord, ...]:
        """Return the records of cases, as far as they were simulated."""
        return tuple(record for case in cases if (record := self.store.find(case)) is not None)

    @property
    def crashed(self) -> dict[Case, Failure]:
        """Cases whose simulation crashed, with why."""
        return {case: why for run in self.runs for case, why in run.crashed.items()}

    def count(self) -> Counts:
        """Return how many simulations there were."""
        taken = set[Case]().union(*(run.taken for run in self.runs)) & self.stored
        return Counts(sum(run.simulated for run in self.runs), sum(run.copies for run in self.runs), len(taken))

    @property
    def path(self) -> Path | None:
        """The results file, if one is kept."""
        return self.store.path if self.means.output is not None else None

    def _record(  # a MakeRecord, once the first two are given
        self, exact: Case, asked: Asked, tried: Case, plan: Plan, outcome: Outcome, origin: Origin
    ) -> FitRecord:
        of_copy = (tried.model, tried.meter) != (exact.model, exact.meter)  # errors are measured on a small model
        if of_copy and isinstance(outcome, Measurement):
            inside = tuple(f"{block.path}." for block in outcome.blocks.blocks) if outcome.blocks else ()
            outside = tuple(site for site in outcome.sites if not f"{site.path}.".startswith(inside))
            outcome = outcome.model_copy(update={"sites": outside})  # nobody looks at the others, and they are many
        if isinstance(outcome, Measurement) and not plan.is_uniform:
            outcome = outcome.model_copy(update={"trace": None})  # plans are joined from steps whose blocks are alike
        base = () if exact.scheme in ("exact", self.given) else (Choice(exact.scheme, schemes.build(exact.scheme)),)
        training = training_of([*plan.choices, *base], getattr(outcome, "warnings", ()))
        said = {"recipe": self.name, "asked": asked, "training": training, "of_copy": of_copy, "recorded_at": now()}
        return FitRecord(case=tried, outcome=outcome, **said, **origin)


@contextmanager
def fitting(name: str, case: Case, choices: Choices, means: Means) -> Iterator[Fitting]:
    """Hold the results file ``name`` and what simulates cases open, and write the tables beside the file at the end.

    ``case`` is that of the user's exact step.

    Raises:
        UsageError: The machines cannot be reached.
        StoreError: The results file is in use, broken or cannot be written.
    """
    elsewhere = means.machines is not None and means.machines.elsewhere
    with FITTED.opened(name, means.output, of_any_machine=elsewhere) as store:
        with simulator(
            means.machines,
            jobs=means.jobs_here,
            timeout_seconds=means.timeout_seconds,
            command=means.command,
            progress=means.progress,
            preload=_needed(case, choices),
            bench=scripts.bench_of(case),
        ) as simulates:
            stored = frozenset(record.case for record in store.records)
            yield Fitting(means, name, case.scheme, store, simulates, stored)
        if means.output is not None:
            FITTED.write_beside(store.path, store.records, FIT_TITLE)


def _needed(case: Case, choices: Choices) -> Sequence[str]:
    """Return the modules to import once, and not in each process."""
    if case.script is not None:
        return ()  # it imports what it needs itself
    used = [*parts_in(schemes.build(case.scheme)), *(choice.scheme for choice in choices.all if choice.scheme)]
    defined = sorted({type(scheme).__module__ for scheme in used})
    if parse_model_name(case.model).kind == "torchvision":  # transformers takes seconds, and hardly a scheme needs it
        return ("actbench.workload.torchvision", *defined)
    return (*PRELOAD, *defined, *sorted({name for scheme in used for name in scheme.card.libraries}))


def checked(case: Case) -> tuple[Case, DeviceProfile]:
    """Return the case of the exact step with the memory limit, and the device profile.

    Raises:
        UsageError: The device profile does not exist or has no figures of time.
    """
    profile = profiles.get(case.device_profile or profiles.DEFAULT)
    if profile.rates is None:
        raise UsageError(
            f"--device-profile {profile.name}: its speed is unknown, so that no time can be estimated; name another "
            "card ('actbench devices')"
        )
    settings: Mapping[str, object] = {
        "meter": "simulated",
        "device_profile": profile.name,
        "memory_limit_bytes": profile.step_bytes(case.memory_limit_bytes),
        "find_largest_batch": False,
        "gradient_quality": False,
    }
    return case.model_copy(update=settings), profile


def choices_of(case: Case, asked: Asked, profile: DeviceProfile, names: Sequence[str] | None) -> Choices:
    """Return the choices for the case of an exact step on a device.

    Raises:
        UsageError: A name is of no scheme, or of one that spreads the model over processes.
    """
    optimizers: dict[Optimizer, bool] = dict.fromkeys(asked.others, False)
    if case.script is None:
        optimizers |= dict.fromkeys(same_updates(case.optimizer), True)  # of AdamW, if the model brings its own
    has_bfloat16 = profile.has_tensor_float or not profile.is_cuda
    changes = scripts.changed_in(case)
    return choices_for(
        case,
        optimizers,
        only_exact=asked.exact,
        names=names,
        limits_error=asked.max_gradient_error is not None,
        has_bfloat16=has_bfloat16,
        changes=changes,
    )
