"""Other questions than which plan is fastest: how long a sequence, how large a batch, which card, how many of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, Literal, NamedTuple

from actbench import scheme as schemes
from actbench.errors import MeasurementError, SpecError
from actbench.measuring import search
from actbench.measuring.search import BatchTrial
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case, Failure
from actbench.report.advice import needed_bytes
from actbench.report.tables.table import Table, fill
from actbench.report.tables.values import Column
from actbench.scheme.facets import Spread
from actbench.scheme.mesh import DATA
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit.answer import about_crashed
from actbench.tools.fit.cache import Shown
from actbench.tools.fit.codegen import pieces_of
from actbench.tools.fit.costs import COPIES, Blocks
from actbench.tools.fit.plan import Candidate, Candidates, Plan
from actbench.tools.fit.planner import Found, Goal, Planner
from actbench.tools.fit.records import ANY, EXACT, LEVELS, Asked, PlannedStep, Training, step_seconds_of
from actbench.tools.fit.simulations import Means, Simulations, candidates_of, checked, simulations
from actbench.units import format_bytes
from actbench.workload.names import with_blocks

Axis = Literal["sequence_length", "batch_size"]
"""What grows."""

_UNITS: dict[Axis, str] = {"sequence_length": "tokens", "batch_size": "rows"}
_WHAT: dict[Axis, str] = {"sequence_length": "Longest sequence", "batch_size": "Largest batch"}
_LEVELS: dict[Training, str] = {
    EXACT: "exact",
    ANY.model_copy(update={"updates": "other", "precision": "other"}): "any",
    LEVELS[-1]: "adapters",
}
"""How far training may differ, the nearest first, with what a table calls it."""

_TRAINING: Final = Column[Any]("training", "Training", "text", lambda row: _LEVELS[row.level])
_SCHEME: Final = Column[Any]("scheme", "Scheme", "text", lambda row: row.step.spec)
_NEED: Final = Column[Any]("need_bytes", "Need", "bytes", lambda row: row.step.need_bytes)
_SECONDS: Final = Column[Any]("estimated_step_seconds", "Step (est.)", "seconds", lambda row: row.step.seconds)
_SLOWDOWN: Final = Column[Any]("slowdown", "Time (est.)", "ratio", lambda row: row.step.slowdown)
_GRADIENT: Final = Column[Any]("gradient", "Gradient", "text", lambda row: row.step.gradient)


def _levels(asked: Asked) -> list[Training]:
    return [EXACT] if asked.exact else [*_LEVELS]


def _shown(
    made: Simulations, table: Table, chosen: Sequence[PlannedStep], remarks: Sequence[str], show_code: int
) -> Shown:
    """Return what is shown of a question: a table of chosen plans, the nearest to the exact step first."""
    cut_short = made.budget.reason
    lead = (cut_short if chosen else f"Nothing found yet. {cut_short}",) if cut_short else ()
    notes = (*table.notes, *about_crashed(made.crashed, made.path))
    records = tuple({each.record.case: each.record for each in chosen}.values())
    return Shown(
        tables=(replace(table, lead=lead, notes=notes),),
        code=pieces_of(((plan.words, plan) for plan in chosen), show_code),
        counted=tuple(made.counted()),
        remarks=(*remarks, *([f"results: {made.path}"] if made.path else [])),
        is_possible=bool(chosen),
        records=lambda: records,
        is_whole=not (cut_short or made.crashed),
        path=made.path,
    )


def _step(made: Simulations, case: Case, outcome: Outcome | None, exact_seconds: float) -> PlannedStep | None:
    """Return a plan that was simulated, beside the exact step; None if it was not."""
    record, seconds = made.store.find(case), step_seconds_of(outcome)
    if record is None or seconds is None or not isinstance(outcome, Measurement):
        return None
    return PlannedStep(record, outcome, seconds, exact_seconds)


# -- how long a sequence, how large a batch --------------------------------------------------------------------------

LARGEST = 1 << 22
"""No size beyond it is tried."""

Simulated = tuple[Case, Outcome]

_SURVEYS = 3  # of one level; a plan that needs least of short samples may not need least of long ones
_OF_SURVEY = 0.4  # share of the time that is left; the rest is for sizes
_PRECISION = 0.002  # share of the least peak to which the least that is fast enough is found


@dataclass(frozen=True)
class Largest:
    """The largest size at which a plan of a level fits.

    Attributes:
        size: The size; 0 if not even one token, or one row, fits.
        step: The fastest plan found at the size, or what needs least at 1.
        beyond_bytes: What the plan that needs least would need at one more; None if it cannot be simulated there, or if
            it is too slow there.
        why_no_more: Why one more cannot be simulated, or how slow the step is there.
    """

    level: Training
    size: int
    step: PlannedStep
    beyond_bytes: int | None = None
    why_no_more: str = ""


def largest(case: Case, axis: Axis, asked: Asked, means: Means, show_code: int = 0) -> Shown:
    """Return the largest size at which a step fits, for each way of training; simulated there, and at one more.

    ``case`` has the size from which on others are tried. Slowdowns are over the exact step's time at the same size. The
    arguments, and what is raised, are otherwise those of :func:`actbench.tools.fit.fit.find`.
    """
    case, profile = checked(case.model_copy(update={axis: getattr(case, axis) or 128}))
    candidates = candidates_of(case, asked, profile, means.schemes)
    with simulations(f"{case.model}-{profile.name}", case, candidates, means) as made:
        sizes = Sizes(made, case, asked, axis)
        found = sizes.run(_levels(asked))
    kept: list[Largest] = []
    for each in found:
        if each is not None and not (each.level.trained == "all" and any(each.size <= it.size for it in kept)):
            kept.append(each)
    fitting = [each for each in kept if each.size]
    where = f"{case.model} on {profile.name}" + (f", batch {case.batch_size}" if axis != "batch_size" else "")
    notes = [f"Limit {format_bytes(sizes.limit)}; at most {asked.max_slowdown:g} times the exact step's time."]
    size = Column[Largest](axis, _WHAT[axis], "count", lambda row: row.size)
    beyond = Column[Largest]("beyond_bytes", "Need at one more", "bytes", lambda row: row.beyond_bytes)
    columns = (_TRAINING, size, _SCHEME, _NEED, beyond, _SECONDS, _SLOWDOWN)
    table = fill(f"{_WHAT[axis]}: {where}", columns, fitting or kept, notes)
    remarks = [_about(each, _UNITS[axis], sizes.limit) for each in kept]
    return _shown(made, table, [each.step for each in fitting], remarks, show_code)


def _about(found: Largest, unit: str, limit: int) -> str:
    """Return the sentence of one way of training."""
    name, step, need = _LEVELS[found.level], found.step, format_bytes(found.step.need_bytes)
    if not found.size and step.need_bytes <= limit:
        slow = f"{step.spec} takes {step.slowdown:.3g} times the exact step's time"
        return f"{name}: not even 1 of the {unit} is fast enough: {slow}"
    if not found.size:
        return f"{name}: not even 1 of the {unit} fits in {format_bytes(limit)}: {step.spec} needs {need}"
    said, more = f"{name}: {found.size:,} {unit} fit with {step.spec} ({need})", f"{found.size + 1:,}"
    if found.beyond_bytes is not None:
        return f"{said}, and {more} do not: the plan of least need needs {format_bytes(found.beyond_bytes)}"
    if found.why_no_more:
        return f"{said}; of {more}: {found.why_no_more}"
    return f"{said}; more was not tried" if found.size >= LARGEST else f"{said}; no time was left to try more"


@dataclass
class Sizes:
    """Finds largest sizes of one model on one card, from the case of the exact step at any size, with its limit."""

    made: Simulations
    case: Case
    asked: Asked
    axis: Axis
    _planners: dict[int, Planner] = field(default_factory=dict, repr=False)
    _exact: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def limit(self) -> int:
        """Bytes that a step may use."""
        return self.case.memory_limit_bytes or 0

    def run(self, levels: Sequence[Training]) -> list[Largest | None]:
        """Return the largest size for each level; None if there are no plans of it, or no time was left for any.

        Each level has its first search before any has a second one. A MeasurementError if there is no exact step.
        """
        self._surveyed(getattr(self.case, self.axis))
        best = dict[Training, Largest | None].fromkeys(levels)
        growing = list(levels)
        for _ in range(_SURVEYS):
            for level in list(growing):
                with self.made.searching("sizes", 1 / len(growing)):
                    found = self._larger(level, best[level])
                if found is not None:
                    best[level] = found
                if found is None or found.size in (0, LARGEST):
                    growing.remove(level)
        return [self._quickened(each) if each is not None and each.size else each for each in best.values()]

    def _larger(self, level: Training, best: Largest | None) -> Largest | None:
        """Return what another survey, at the largest size so far, finds beyond it; None if nothing."""
        if best is not None and not self.made.budget.left_seconds:
            return None
        size = getattr(self.case, self.axis) if best is None else best.size
        try:
            plan = self._least(self._surveyed(size), level)
        except MeasurementError:  # of a larger size: there was no time for the exact step, or it cannot be
            if best is None:
                raise
            return None
        grown = plan and self._grown(level, plan, size)
        return grown if grown and (best is None or grown.size > best.size) else None

    def _surveyed(self, size: int) -> Planner:
        if size not in self._planners:
            case = self._at(size)
            candidates = self.made.candidates(case, self.asked)
            if self.axis == "batch_size":
                candidates = replace(candidates, in_parts=())  # in micro-batches any batch fits of which one row does
            planner = self.made.planner(case, self.asked, candidates)
            with self.made.searching("single changes", _OF_SURVEY):
                planner.run()
            self._planners[size] = planner
        return self._planners[size]

    def _at(self, size: int) -> Case:
        return self.case.model_copy(update={self.axis: size})

    def _least(self, planner: Planner, level: Training) -> Plan | None:
        """Return the plan that needs least of those that are fast enough; None if none is."""
        least, seconds = planner.space.least(level), self.asked.max_slowdown * planner.exact_step.seconds
        if least is None or least.seconds <= seconds:
            return least
        enough, low, high = None, least.peak, max(float(planner.exact_step.need), least.peak)
        while enough is None or high - low > _PRECISION * least.peak:
            limit = (low + high) / 2 if enough else high
            plan = planner.space.solve(level, limit)
            if plan is not None and plan.seconds <= seconds:
                enough, high = plan, min(limit, plan.peak)
            elif enough is None:
                return None
            else:
                low = limit
        return enough

    def _grown(self, level: Training, plan: Plan, size: int, *more: int) -> Largest | None:
        """Return the largest size at which a plan fits, by simulations of it at several; None if none can be had.

        The first are at a surveyed size and at ``more``.
        """
        places = self._planners[size].space.blocks.whole

        def simulated(sizes: Iterable[int]) -> dict[int, Simulated]:
            found = self.made.of(self.case, self.asked)({plan.case(self._at(each), places): plan for each in sizes})
            return {getattr(case, self.axis): (case, outcome) for case, outcome in found}

        def slowdown(size: int, measured: Measurement) -> float:  # NaN if there was no time for the exact step
            return (step_seconds_of(measured) or math.nan) / self._exact_seconds(size)

        fits, known = largest_size(
            simulated,
            self.limit,
            size,
            *more,
            is_fast=lambda size, measured: slowdown(size, measured) <= self.asked.max_slowdown,
        )
        case, outcome = known.get(fits or 1, (self.case, None))
        step = _step(self.made, case, outcome, self._exact_seconds(fits or 1))
        _, beyond = known.get(fits + 1, (None, None))
        need, why = None, getattr(beyond, "message", "")
        if isinstance(beyond, Measurement):
            need = needed_bytes(beyond) if needed_bytes(beyond) > self.limit else None
            slower = math.nan if need else slowdown(fits + 1, beyond)
            why = "" if math.isnan(slower) else f"{slower:.3g} times the exact step's time"
        return None if step is None else Largest(level, fits, step, need, why)

    def _exact_seconds(self, size: int) -> float:
        if size not in self._exact:
            self._exact[size] = step_seconds_of(self.made.one(self._at(size), self.case, self.asked)) or math.nan
        return self._exact[size]

    def _quickened(self, best: Largest) -> Largest:
        """Return the fastest plan at the largest size, if that size was surveyed; it may fit at more, too.

        The allocator loses other bytes of it than of the plan whose tensors need least.
        """
        planner = self._planners.get(best.size)
        if planner is None:
            return best
        goal = Goal(best.level, self.limit)
        planner.pursue([goal])
        fastest = planner.fastest(goal)
        if fastest is None or fastest.seconds >= best.step.seconds:
            return best
        grown = self._grown(best.level, fastest.plan, best.size, best.size + 1)
        if grown is not None and grown.size > best.size:
            return grown
        step = _step(self.made, fastest.case, fastest.measured, best.step.exact_seconds)
        return best if step is None else replace(best, step=step)


def largest_size(
    simulate: Callable[[Iterable[int]], Mapping[int, Simulated]],
    limit: int,
    *start: int,
    is_fast: Callable[[int, Measurement], bool] = lambda size, measured: True,
) -> tuple[int, Mapping[int, Simulated]]:
    """Return the largest size that fits, 0 if not even 1 does, and all that was simulated, such as the next larger one.

    ``simulate`` leaves out sizes for which there is no time; a size that is not fast enough does not count as fitting.
    """
    known: dict[int, Simulated] = {}
    trials: dict[int, BatchTrial] = {}

    def learn(sizes: Iterable[int]) -> None:
        for size, (case, outcome) in simulate(sizes).items():
            known[size], trials[size] = (case, outcome), BatchTrial(False)
            if isinstance(outcome, Measurement):
                need = needed_bytes(outcome)
                trials[size] = BatchTrial(need <= limit and is_fast(size, outcome), need)

    def tried(size: int) -> BatchTrial:
        if size not in trials:  # neighbours are simulated side by side
            learn([each for each in (size, size + 1) if each <= LARGEST and each not in trials])
        if size not in trials:
            raise TimeoutError
        return trials[size]

    learn(start)
    if trials:
        with suppress(TimeoutError):
            search.largest(tried, memory_limit_bytes=limit, known=trials, largest_tried=LARGEST)
    return max((size for size, trial in trials.items() if trial.fits), default=0), known


# -- which card ------------------------------------------------------------------------------------------------------

_OF_CHANGES, _OF_PLANS = 0.3, 0.5  # shares of the time that is left; the rest is for the plans on each card
_TRIED = 2  # plans of a way of training that are simulated for a card: another may be faster there


class OnCard(NamedTuple):
    """The fastest plan of a way of training on a card."""

    profile: DeviceProfile
    level: Training
    step: PlannedStep


def which_card(case: Case, asked: Asked, means: Means, show_code: int = 0) -> Shown:
    """Return the cards that a step fits on, the smallest first, each with the fastest plan for each way of training.

    Plans are made for the device of ``case``, or else for the shipped one of most memory. The arguments, and what is
    raised, are otherwise those of :func:`actbench.tools.fit.fit.find`.
    """
    rated = sorted((each for each in profiles.profiles() if each.rates), key=lambda each: each.memory_bytes)
    largest_card = max(rated, key=lambda each: each.memory_bytes).name
    case, profile = checked(case.model_copy(update={"device_profile": case.device_profile or largest_card}))
    candidates, levels = candidates_of(case, asked, profile, means.schemes), _levels(asked)
    rows, without, untried = list[OnCard](), list[str](), list[str]()
    with simulations(f"{case.model}-cards", case, candidates, means) as made:
        cards = [each for each in rated if each.is_cuda]
        planner = made.planner(case, asked)
        with made.searching("single changes", _OF_CHANGES):
            planner.run()
        with made.searching("plans", _OF_PLANS):
            planner.pursue([Goal(level, card.step_bytes()) for card in cards[1:] for level in levels], rounds=2)
            planner.answer(cards[0].step_bytes(), levels)  # or what needs least, if none fits
        for card in cards:
            with made.searching("plans on each card"):
                found = list(_on_card(card, planner, made, asked, levels))
            rows += found
            if not found and made.budget.cut_short:
                untried.append(card.name)
            elif not found:
                least = min(each.need for each in planner.found)
                without.append(f"{card.name} (the least needs {format_bytes(least)})")
    title = f"Cards on which a step fits: {case.model}, batch {case.batch_size}"
    notes = [f"Plans were made for {profile.name}, and simulated for each card; times are estimated."]
    if without:
        notes.append(f"Nothing fits within {asked.max_slowdown:g} times the exact step's time on {', '.join(without)}.")
    if untried:
        notes.append(f"Not all plans could be tried in time for {', '.join(untried)}.")
    nothing = [] if untried else ["nothing fits on any card"]
    remarks = [f"the smallest card: {rows[0].profile.name}"] if rows and not untried else nothing
    return _shown(made, fill(title, _CARD_COLUMNS, rows, notes), [each.step for each in rows], remarks, show_code)


def for_card(card: DeviceProfile, planner: Planner, level: Training) -> list[Found]:
    """Return the fastest plans of a level that a card has memory and types for."""
    fits = [
        each
        for each in planner.reaching(Goal(level, card.step_bytes()))
        if card.has_tensor_float or not any(one.needs_bfloat16 for one in each.plan.candidates)
    ]
    return fits[:_TRIED]


def _on_card(
    card: DeviceProfile, planner: Planner, made: Simulations, asked: Asked, levels: Sequence[Training]
) -> Iterator[OnCard]:
    """Yield the fastest plans on a card; one that trains further from the exact step has to be faster."""
    settings = {"device_profile": card.name, "memory_limit_bytes": card.step_bytes()}
    exact = planner.exact.model_copy(update=settings)
    plans = {
        level: {each.case.model_copy(update=settings): each.plan for each in for_card(card, planner, level)}
        for level in levels
    }
    if not any(plans.values()):
        return
    of_all = {case: plan for of_level in plans.values() for case, plan in of_level.items()}
    outcomes = dict(made.of(exact, asked)({exact: Plan(), **of_all}))
    seconds, fastest = step_seconds_of(outcomes.get(exact)), math.inf
    for level, of_level in plans.items() if seconds is not None else ():
        steps = filter(None, (_step(made, case, outcomes.get(case), seconds or math.nan) for case in of_level))
        fits = (each for each in steps if each.need_bytes <= card.step_bytes() and each.slowdown <= asked.max_slowdown)
        best = min(fits, key=lambda each: each.seconds, default=None)
        if best is not None and (best.seconds < fastest or best.training.trained == "adapters"):
            fastest = min(fastest, best.seconds)
            yield OnCard(card, level, best)


_CARD_COLUMNS: Final[tuple[Column[OnCard], ...]] = (
    Column("device", "Card", "text", lambda row: row.profile.name),
    Column("memory_bytes", "Memory", "bytes", lambda row: row.profile.memory_bytes),
    *(_TRAINING, _SCHEME, _NEED, replace(_SECONDS, better="lower"), _SLOWDOWN, _GRADIENT),
)


# -- over how many processes -----------------------------------------------------------------------------------------

_OF_WAYS, _OF_PLANNED_CHANGES = 0.4, 0.6  # shares of the time that is left; the rest is for plans
_PLANNED = 1  # ways with which plans are made, beside the fastest that trains exactly


class Sharded(NamedTuple):
    """A plan with a way to share the model out, compared with the exact step of the same way."""

    processes: int
    step: PlannedStep
    samples_per_second: float


class _Estimate(NamedTuple):
    """About what a step of a way needs and takes with all blocks recomputed."""

    way: str
    need: float
    seconds: float


def shared_out(case: Case, counts: Sequence[int], asked: Asked, means: Means) -> Shardings:
    """Return how a model is shared out over the fewest processes on which a step fits.

    ``case`` is that of one process, which has a device for itself. Slowdowns are over the exact step's time with the
    same sharding. The arguments, and what is raised, are otherwise those of :func:`actbench.tools.fit.fit.find`.
    """
    case, profile = checked(case)
    levels = [level for level in _levels(asked) if level.trained == "all"]
    candidates = candidates_of(case, asked, profile, means.schemes)
    with simulations(f"{case.model}-{profile.name}", case, candidates, means) as made:
        found = Shardings(made, case, asked)
        for count in sorted(set(counts)):
            found.rows = found.run(count, levels)
            if found.rows:
                break
            found.too_few.append(count)
    return found


def over_processes(case: Case, counts: Sequence[int], asked: Asked, means: Means, show_code: int = 0) -> Shown:
    """Return what a command shows of :func:`shared_out`."""
    found = shared_out(case, counts, asked, means)
    (need, spec), numbers, left = found.least, ", ".join(map(str, found.too_few)), ", ".join(found.left_out)
    nothing = f"nothing fits on {numbers} processes: {spec} needs {format_bytes(need)}, the least that was found"
    if not found.knows_least:
        nothing = f"on {numbers} processes the time ended before the least need was known"
    remarks = [nothing] if numbers else []
    remarks += [f"cannot be: {way}: {why}" for way, why in found.refused.items()]
    estimated = f"estimated only with all blocks treated equally, because other ways promise more: {left}"
    remarks += [estimated] if left else []
    limit = f"Limit {format_bytes(found.case.memory_limit_bytes or 0)} of each process"
    notes = [f"{limit}; batch {case.batch_size} of each; times are estimated."]
    title = f"Shared out: {case.model} over processes with {found.case.device_profile} each"
    table = fill(title, _SHARDED_COLUMNS, found.rows, notes)
    return _shown(found.made, table, [each.step for each in found.rows], remarks, show_code)


_SHARDED_COLUMNS: Final[tuple[Column[Sharded], ...]] = (
    Column("processes", "Processes", "count", lambda row: row.processes),
    _SCHEME,
    Column("optimizer", "Optimizer", "text", lambda row: row.step.optimizer),
    *(replace(_NEED, title="Need of each"), _SECONDS, _SLOWDOWN),
    Column("samples_per_second", "Samples/s (est.)", "rate", lambda row: row.samples_per_second, "higher"),
    _GRADIENT,
)


def ways(processes: int, devices: int) -> list[str]:
    """Return the specifications of all ways to spread a model over processes, ``devices`` of them in a machine.

    Layers are cut into a power of two of parts, within a machine; schemes that give each process its own batch come
    around that.
    """
    found: dict[str, Spread] = {}
    for name in schemes.find_schemes():
        with suppress(SpecError):  # it needs a value
            spread = schemes.build(name).facet(Spread)
            found |= {name: spread} if spread is not None else {}
    over_batches = [(name, end) for name, spread in found.items() if not spread.of_layers for end in spread.variants]
    specs = [f"{name}:{processes}{end}" for name, end in over_batches]
    powers = [2**n for n in range(1, min(devices, processes).bit_length()) if processes % 2**n == 0]
    for name, parts in product([name for name, spread in found.items() if spread.of_layers], powers):
        count = processes // parts
        around = [f"+{other}:{count}{end}" for other, end in over_batches] if count > 1 else [""]
        specs += [f"{name}:{parts}{more}" for more in around]
    return [schemes.build(spec).spec for spec in specs]


def _batches(way: str) -> int:
    spread = schemes.build(way).facet(Spread)
    return spread.axes.get(DATA, 1) if spread is not None else 1


@dataclass
class Shardings:
    """Ways to share one model out, on one card for each process.

    Attributes:
        case: The case of the exact step of one process.
        rows: What fits on the fewest processes, the most samples a second first.
        too_few: Numbers of processes on which nothing fits.
        refused: Ways that cannot be simulated, with the reason.
        left_out: Ways that were only estimated: others are faster, or need less.
        least: The least need of the plans that were simulated whole, with the specification.
        knows_least: Whether what needs least was simulated with each way on which nothing fits.
    """

    made: Simulations
    case: Case
    asked: Asked
    rows: list[Sharded] = field(default_factory=list)
    too_few: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    least: tuple[float, str] = (math.inf, "")
    knows_least: bool = True

    def run(self, processes: int, levels: Sequence[Training]) -> list[Sharded]:
        """Return what fits on so many processes, the most samples a second first; an error if no way can be tried."""
        rates = profiles.get(self.case.device_profile or "").rates
        with self.made.searching(f"ways to share the model out over {processes} processes", _OF_WAYS):
            possible = filter(self._is_allowed, ways(processes, rates.links.devices if rates else processes))
            found = [estimate for way in possible if (estimate := self._estimated(way)) is not None]
        if not found and self.made.budget.cut_short:
            self.knows_least = False
            return []
        if not found:
            why = "; ".join(f"{way}: {reason}" for way, reason in self.refused.items())
            raise MeasurementError(f"no way to shard the model over {processes} processes can be simulated: {why}")
        chosen = self._chosen(found)
        self.left_out += [each.way for each in found if each.way not in chosen]
        rows = list[Sharded]()
        for place, way in enumerate(chosen):
            with self.made.searching(f"plans with {way}", 1 / (len(chosen) - place)):
                rows += self._planned(way, processes, levels)
        return sorted(rows, key=lambda row: -row.samples_per_second)

    def _is_allowed(self, way: str) -> bool:
        candidate, training = Candidate.of(way), Candidate.of(way).training()
        is_typed = self.case.autocast is not None or self.case.dtype not in (None, "float32")
        if (self.asked.exact and not training.is_exact) or (is_typed and training.precision == "other"):
            return False
        return profiles.get(self.case.device_profile or "").has_tensor_float or not candidate.needs_bfloat16

    def _chosen(self, found: Sequence[_Estimate]) -> list[str]:
        """Return the ways to plan with: the fastest that fit, or else those that need least."""

        def order(each: _Estimate) -> tuple[bool, float]:
            fits = each.need <= (self.case.memory_limit_bytes or 0)
            return not fits, -_batches(each.way) / each.seconds if fits else each.need

        best = [each.way for each in sorted(found, key=order)]
        exact = [way for way in best if Candidate.of(way).training().is_exact]
        return list(dict.fromkeys([*best[:_PLANNED], *exact[:1]]))

    def _estimated(self, way: str) -> _Estimate | None:
        """Return about what a way needs, from two copies of few blocks, or from the model itself if it has few."""
        try:
            base = self._base(way)
        except SpecError as error:  # what every plan has does not stand with it
            self.refused[way] = str(error)
            return None
        models = [with_blocks(self.case.model, copied) for copied in COPIES] if self._count else [self.case.model]
        again = next((each for each in self._candidates(base).of_blocks if each.recomputes), None)
        plan = Plan(rest=frozenset({again})) if again else Plan()
        cases = [plan.case(base.model_copy(update={"model": model}), Blocks().whole) for model in models]
        outcomes = dict(self.made.of(base, self.asked)(dict.fromkeys(cases, plan)))
        ended = [outcome for case in cases if (outcome := outcomes.get(case))]
        for failed in (each for each in ended if isinstance(each, Failure)):
            self.refused.setdefault(way, failed.message)
        steps = [each for each in ended if isinstance(each, Measurement)]
        told = [(float(needed_bytes(each)), seconds) for each in steps if (seconds := step_seconds_of(each))]
        if len(told) < len(cases):
            return None
        few, more = COPIES
        copies = (self._count - few) / (more - few)
        return _Estimate(way, *(one + copies * (two - one) for one, two in zip(told[0], told[-1], strict=True)))

    @cached_property
    def _count(self) -> int:
        """Blocks of the model; 0 if copies do not tell about it."""
        outcome = self.made.one(self.case, self.case, self.asked)
        blocks = Blocks.of(outcome.blocks if isinstance(outcome, Measurement) else None)
        return len(blocks.paths) if (found := blocks.shortened(self.case.model)) and found.grows else 0

    def _base(self, way: str) -> Case:
        """Return the case of the exact step with a way, and with the schemes that every plan has."""
        parts = (self.case.scheme, way) if self.case.scheme != "exact" else (way,)
        return self.case.model_copy(update={"scheme": schemes.build("+".join(parts)).spec})

    def _candidates(self, base: Case) -> Candidates:
        return replace(self.made.candidates(base, self.asked), computing=())  # the way says in which type is computed

    def _planned(self, way: str, processes: int, levels: Sequence[Training]) -> Iterator[Sharded]:
        """Yield the fastest plan of each level with a way, unless one nearer to the exact step is as fast."""
        base = self._base(way)
        planner, limit = self.made.planner(base, self.asked, self._candidates(base)), base.memory_limit_bytes or 0
        try:
            with self.made.searching(f"single changes with {way}", _OF_PLANNED_CHANGES):
                planner.run()
        except MeasurementError:
            if not self.made.budget.cut_short:
                raise
            self.knows_least = False  # there was no time for the exact step
            return
        planner.answer(limit, levels)
        self.least = min(self.least, *((float(each.need), each.case.scheme) for each in planner.found))
        if all(each.need > limit for each in planner.found):
            self.knows_least = self.knows_least and planner.knows_least
        fastest = math.inf
        for best in (planner.fastest(Goal(level, limit)) for level in levels):
            step = best and _step(self.made, best.case, best.measured, planner.exact_step.seconds)
            if step and step.slowdown <= self.asked.max_slowdown and step.seconds < fastest:
                fastest = step.seconds
                yield Sharded(processes, step, _batches(way) * base.batch_size / step.seconds)
