"""What plans are made with: what simulates the cases of a search, and the file that keeps each as soon as it ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actbench import scheme as schemes
from actbench.errors import UsageError
from actbench.machine import machine, now, provenance
from actbench.model.data import LEFT_OUT, OutcomeData
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure, Optimizer
from actbench.report.store import Store
from actbench.run.executor import COMPILER, PRELOAD, Machines, Told, Work
from actbench.run.local import ThisMachine
from actbench.run.progress import Progress
from actbench.run.runner import outcomes
from actbench.scheme.composed import parts_in
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit import scripts
from actbench.tools.fit.budget import BUDGET_SECONDS, Budget
from actbench.tools.fit.plan import Candidate, Candidates, Plan, candidates_for, training_of
from actbench.tools.fit.planner import Planner
from actbench.tools.fit.records import Asked, FitRecord, is_crash
from actbench.tools.fit.tables import FIT_TITLE, FITTED
from actbench.units import counted
from actbench.workload.names import find_preset, parse_model_name
from actbench.workload.optimizers import same_updates

_REFUSALS = ("nothing-converted", "unsupported", "unavailable")

Simulator = Callable[[Sequence[Case], Callable[[], bool], Callable[[], bool]], Generator[Told, None, None]]
"""Simulates cases, several at a time, and yields each as it ends.

It leaves out cases that may not begin any more, as the first function says, or not go on, as the second says.
"""


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
class Simulations:
    """An open results file, and what simulates; several planners may share both.

    Attributes:
        means: How plans are made.
        name: Of the records.
        given: What the user's exact step has, too: plans train as it does.
        store: The results file.
        simulator: What simulates cases.
        stored: Cases that the results file had when it was opened.
        budget: The time that the planners share.
        best: Tells the best plan so far; empty if there is none.
        whole: How many simulations of the whole model there were; a plan has one for each limit that it is tried with.
        copies: How many of copies with fewer blocks and of smaller models.
        taken: Cases that the results file had.
        crashed: Cases whose simulation crashed, with why.
    """

    means: Means
    name: str
    given: str
    store: Store[FitRecord]
    simulator: Simulator
    stored: frozenset[Case] = frozenset()
    budget: Budget = field(init=False)
    best: Callable[[], str] = field(default=lambda: "", repr=False)
    whole: int = 0
    copies: int = 0
    taken: set[Case] = field(default_factory=set, repr=False)
    crashed: dict[Case, Failure] = field(default_factory=dict, repr=False)
    _origin: Mapping[str, Any] = field(init=False, repr=False)
    _search: str = field(default="plans", repr=False)
    _planned: list[Case] = field(default_factory=list, repr=False)  # progress counts all of them

    def __post_init__(self) -> None:
        """Let the time begin."""
        self.budget = Budget(self.means.budget_seconds)
        self._origin = provenance(self.means.command)

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

    def planner(
        self, case: Case, asked: Asked, found: Candidates | None = None, *, is_joining: bool = False
    ) -> Planner:
        """Return a planner of the case of an exact step, which has simulated nothing yet.

        With ``is_joining`` it joins plans from traces; the plans that are told have to be proved then.
        """
        simulate = self.of(case, asked)
        note = partial(self._note, case, self._asked(case, asked))
        return Planner(
            case,
            found or self.candidates(case, asked),
            simulate,
            is_joining=is_joining,
            note=note,
            is_over=lambda: self.budget.left_seconds == 0,
        )

    def candidates(self, case: Case, asked: Asked) -> Candidates:
        """Return what may be changed in the case of an exact step."""
        return candidates_of(case, asked, profiles.get(case.device_profile or ""), self.means.schemes)

    def of(self, exact: Case, asked: Asked) -> Callable[[Mapping[Case, Plan]], Iterator[tuple[Case, Outcome]]]:
        """Return what gives the outcomes of cases which differ only by their plans from that of an exact step."""
        return partial(self._outcomes, exact, self._asked(exact, asked))

    def one(self, case: Case, exact: Case, asked: Asked) -> Outcome | None:
        """Return the outcome of a case without a plan, such as that of an exact step; None if the time is over."""
        return next((outcome for _, outcome in self.of(exact, asked)({case: Plan()})), None)

    @staticmethod
    def _asked(exact: Case, asked: Asked) -> Asked:
        of_exact = {"optimizer": exact.optimizer, "scheme": exact.scheme, "limit_bytes": exact.memory_limit_bytes}
        return asked.model_copy(update=of_exact)

    def _outcomes(self, exact: Case, asked: Asked, plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        """Yield each case with its outcome; leave out cases that cannot begin before time runs out."""
        todo = []
        for case in plans:
            record = self.store.find(case) if self.store.done(case) else None
            # what crashed in another run may not crash again
            if record is None or record.joined or (is_crash(record.outcome) and case not in self.crashed):
                todo.append(case)
                continue
            self.taken.add(case)
            known = {"machine": record.machine, "versions": record.versions, "command": record.command}
            mine = self._record(exact, asked, case, plans[case], record.outcome, known)
            # Another fit may have asked for something else, or for another model, of which this one was a copy.
            if not mine.of_copy and (record.of_copy or record.asked != mine.asked):
                self.store.append(mine.after(record))
            yield case, record.outcome
        if not todo:
            return
        progress = self.means.progress
        progress.planned([*self._planned, *todo], self.means.jobs_here, more=True)
        self._planned += todo
        with closing(self.simulator(todo, self.budget.may_begin, self.budget.may_go_on)) as ended:
            for case, outcome, origin in ended:
                record = self._record(exact, asked, case, plans[case], outcome, origin).after(self.store.find(case))
                self.store.append(record)
                progress.finished(case, _shown(record))
                if not (isinstance(outcome, Failure) and outcome.reason in _REFUSALS):  # before its step
                    self.whole += not record.of_copy
                    self.copies += record.of_copy
                if is_crash(outcome):
                    self.crashed[case] = outcome
                yield case, outcome
                self._tell()

    def _note(self, exact: Case, asked: Asked, case: Case, plan: Plan, outcome: Measurement) -> None:
        """Store a step that was joined from traces, unless the results file has its simulation, or this very row."""
        known = self.store.find(case)
        record = self._record(exact, asked, case, plan, outcome, self._origin).after(known)
        record = record.model_copy(update={"joined": True})
        same = ("outcome", "asked", "training")
        if known is None or (known.joined and any(getattr(known, name) != getattr(record, name) for name in same)):
            self.store.append(record)

    def _record(
        self, exact: Case, asked: Asked, tried: Case, plan: Plan, outcome: Outcome, origin: Mapping[str, Any]
    ) -> FitRecord:
        of_copy = (tried.model, tried.meter) != (exact.model, exact.meter)  # errors are measured on a small model
        if of_copy and isinstance(outcome, Measurement):
            inside = tuple(f"{block.path}." for block in outcome.blocks.blocks) if outcome.blocks else ()
            outside = tuple(site for site in outcome.sites if not f"{site.path}.".startswith(inside))
            outcome = outcome.model_copy(update={"sites": outside})  # the others are not shown, and they are many
        if isinstance(outcome, Measurement) and not plan.is_uniform:
            outcome = outcome.model_copy(update={"trace": None})  # plans are joined from steps whose blocks are equal
        base = () if exact.scheme in ("exact", self.given) else (Candidate.of(exact.scheme),)
        training = training_of([*plan.candidates, *base], getattr(outcome, "warnings", ()))
        said = {"recipe": self.name, "asked": asked, "training": training, "of_copy": of_copy, "recorded_at": now()}
        return FitRecord(case=tried, outcome=outcome, **said, **origin)

    def records(self, cases: Sequence[Case]) -> tuple[FitRecord, ...]:
        """Return the records of cases, as far as they were simulated."""
        return tuple(record for case in cases if (record := self.store.find(case)) is not None)

    def counted(self, error: float | None = None) -> list[str]:
        """Return what a remark says of how many simulations there were.

        ``error`` is the most that a joined peak was off one that was then simulated whole.
        """
        said = f"{counted(self.whole, 'simulation')} of the whole model"
        said += f", {self.copies} of smaller copies of it" if self.copies else ""
        if error is not None:
            said += f"; joined peaks were off by {100 * error:.2f} % at most where they were simulated, too"
        taken = len(self.taken & self.stored)
        more = [f"continued from {self.path}, which had {counted(taken, 'simulation')} of this fit"] if taken else []
        return [said, *more]

    @property
    def path(self) -> Path | None:
        """The results file, if one is kept."""
        return self.store.path if self.means.output is not None else None


class _Refused(OutcomeData):
    """What progress tells of a candidate that the model or the device refuses: why stands below the table."""

    @property
    def state(self) -> str:
        """That the candidate is left out."""
        return LEFT_OUT

    @property
    def is_told(self) -> bool:
        """Whether progress has a line for it, unless it has one for each case."""
        return False


def _shown(record: FitRecord) -> OutcomeData:
    """Return what progress tells of a simulation: whether it is over its limit only if that is the user's own limit."""
    outcome = record.outcome
    if isinstance(outcome, Failure):
        return _Refused() if outcome.reason in _REFUSALS else outcome
    is_users = record.case.memory_limit_bytes == record.asked.limit_bytes
    return outcome if is_users else outcome.model_copy(update={"over_limit_bytes": None})


@contextmanager
def simulations(name: str, case: Case, candidates: Candidates, means: Means) -> Iterator[Simulations]:
    """Hold the results file ``name`` and what simulates cases open, and write the tables beside the file at the end.

    ``case`` is that of the user's exact step.

    Raises:
        UsageError: The machines cannot be reached.
        StoreError: The results file is in use, broken or cannot be written.
    """
    elsewhere = means.machines is not None and means.machines.elsewhere
    needed, later = _needed(case, candidates)
    with FITTED.opened(name, means.output, of_any_machine=elsewhere) as store:
        if store.done(case):  # the first process is then one of a candidate
            needed, later = (*needed, *later), ()
        work = Work(
            means.progress,
            means.command,
            jobs=means.jobs_here,
            timeout_seconds=means.timeout_seconds,
            bench=scripts.bench_of(case),
            preload=needed,
            after_first=later,
        )
        with (means.machines or ThisMachine()).start(work) as executor:
            stored = frozenset(record.case for record in store.records)
            yield Simulations(means, name, case.scheme, store, partial(outcomes, executor, work), stored)
        if means.output is not None:
            FITTED.write_beside(store.path, store.records, FIT_TITLE)


def _needed(case: Case, candidates: Candidates) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules to import once, and not in each process: those of the exact step, and those of candidates."""
    if case.script is not None:
        return (), ()  # it imports what it needs itself
    always, tried = parts_in(schemes.build(case.scheme)), [each.scheme for each in candidates.all if each.scheme]
    defined = sorted({type(scheme).__module__ for scheme in (*always, *tried)})
    if parse_model_name(case.model).kind == "torchvision":  # transformers takes seconds, and hardly a scheme needs it
        return (COMPILER, "actbench.workload.torchvision", *defined), ()
    preset = find_preset(case.model.partition("@")[0])
    kind = preset.config.get("model_type") if preset else None
    of_model = () if kind is None else (f"transformers.models.{kind}.modeling_{kind}",)
    at_once, later = (sorted({name for each in some for name in each.card.libraries}) for some in (always, tried))
    return (*PRELOAD, *of_model, *at_once), (*defined, *later)


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


def candidates_of(case: Case, asked: Asked, profile: DeviceProfile, names: Sequence[str] | None) -> Candidates:
    """Return the candidates for the case of an exact step on a device.

    Raises:
        UsageError: A name is of no scheme, or of one that spreads the model over processes.
    """
    optimizers: dict[Optimizer, bool] = dict.fromkeys(asked.others, False)
    if case.script is None:
        optimizers |= dict.fromkeys(same_updates(case.optimizer), True)  # of AdamW, if the model brings its own
    return candidates_for(
        case,
        optimizers,
        only_exact=asked.exact,
        names=names,
        limits_error=asked.max_gradient_error is not None,
        has_bfloat16=profile.has_tensor_float or not profile.is_cuda,
        changes=scripts.changed_in(case),
    )
