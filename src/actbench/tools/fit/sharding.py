"""Which way to share a model out over processes: each is tried on short copies, and plans are made with the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actbench import scheme as schemes
from actbench.errors import MeasurementError, SpecError
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.scheme.axes import DATA
from actbench.scheme.facets import Spread
from actbench.simulator import profiles
from actbench.tools.fit.choice import Choice
from actbench.tools.fit.choices import Choices
from actbench.tools.fit.copies import COPIES
from actbench.tools.fit.effects import Blocks
from actbench.tools.fit.fitting import Fitting
from actbench.tools.fit.levels import Level
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.planner import Goal
from actbench.tools.fit.records import Asked, Tried, step_seconds_of
from actbench.workload.names import with_blocks

_OF_WAYS, _OF_CHANGES = 0.4, 0.6  # shares of the time that is left; the rest is for plans
_PLANNED = 1  # ways with which plans are made, beside the fastest that trains exactly


def ways(processes: int, devices: int) -> list[str]:
    """Return the specifications of all ways to spread a model over processes, ``devices`` of them in a machine.

    Layers are cut into a power of two of parts, within a machine; schemes that give each process its own batch come
    around that.
    """
    found = {name: spread for name in schemes.find_schemes() if (spread := _spread(name)) is not None}
    over_batches = [(name, end) for name, spread in found.items() if not spread.of_layers for end in spread.variants]
    specs = [f"{name}:{processes}{end}" for name, end in over_batches]
    for name in (name for name, spread in found.items() if spread.of_layers):
        parts = 2
        while parts <= min(devices, processes):
            count, left = divmod(processes, parts)
            if not left:
                around = [f"+{other}:{count}{end}" for other, end in over_batches] if count > 1 else [""]
                specs += [f"{name}:{parts}{more}" for more in around]
            parts *= 2
    return [schemes.build(spec).spec for spec in specs]


def _spread(spec: str) -> Spread | None:
    try:
        return schemes.build(spec).facet(Spread)
    except SpecError:  # it needs a value
        return None


@dataclass(frozen=True)
class Sharded:
    """A plan with a way to share the model out.

    Attributes:
        way: The specification of the way.
        tried: The plan, compared with the exact step of the same way.
    """

    way: str
    processes: int
    tried: Tried

    @property
    def samples_per_second(self) -> float:
        """Samples a second of all processes."""
        return _batches(self.way) * self.tried.record.case.batch_size / self.tried.seconds


@dataclass(frozen=True)
class _Estimate:
    """About what a step of a way needs and takes with all blocks recomputed."""

    way: str
    need: float
    seconds: float


def _batches(way: str) -> int:
    spread = schemes.build(way).facet(Spread)
    return spread.axes.get(DATA, 1) if spread is not None else 1


@dataclass
class Shardings:
    """Ways to share one model out, on one card for each process.

    Attributes:
        made: What simulates.
        case: The case of the exact step of one process.
        asked: What counts as an answer.
        refused: Ways that cannot be simulated, with the reason.
        left_out: Ways that were only estimated: others are faster, or need less.
        least: The least need of the plans that were simulated whole, with the specification.
        knows_least: Whether what needs least was simulated with each way on which nothing fits.
    """

    made: Fitting
    case: Case
    asked: Asked
    refused: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    least: tuple[float, str] = (math.inf, "")
    knows_least: bool = True
    _count: int | None = None

    def run(self, processes: int, levels: Sequence[Level]) -> list[Sharded]:
        """Return what fits on so many processes, the most samples a second first.

        Raises:
            MeasurementError: No way can be simulated.
        """
        links = profiles.get(self.case.device_profile or "").rates
        with self.made.searching(f"ways to share the model out over {processes} processes", _OF_WAYS):
            found = [
                estimate
                for way in ways(processes, links.links.devices if links else processes)
                if self._is_allowed(way) and (estimate := self._estimated(way)) is not None
            ]
        if not found and self.made.budget.cut_short:
            self.knows_least = False
            return []
        if not found:
            why = "; ".join(f"{way}: {reason}" for way, reason in self.refused.items())
            raise MeasurementError(f"no way to shard the model over {processes} processes can be simulated: {why}")
        chosen = self._chosen(found)
        self.left_out += [each.way for each in found if each not in chosen]
        rows = list[Sharded]()
        for place, each in enumerate(chosen):
            with self.made.searching(f"plans with {each.way}", 1 / (len(chosen) - place)):
                rows += self._planned(each.way, processes, levels)
        return sorted(rows, key=lambda row: -row.samples_per_second)

    def _is_allowed(self, way: str) -> bool:
        choice = Choice(way, schemes.build(way))
        if self.asked.exact and not choice.training.is_exact:
            return False
        profile = profiles.get(self.case.device_profile or "")
        is_typed = self.case.autocast is not None or self.case.dtype not in (None, "float32")
        if choice.training.precision == "other" and is_typed:
            return False
        return profile.has_tensor_float or not choice.needs_bfloat16

    def _chosen(self, found: Sequence[_Estimate]) -> list[_Estimate]:
        """Return the ways to plan with: the fastest that fit, or else those that need least."""
        limit = self.case.memory_limit_bytes or 0

        def order(each: _Estimate) -> tuple[bool, float]:
            fits = each.need <= limit
            return not fits, -_batches(each.way) / each.seconds if fits else each.need

        best = sorted(found, key=order)
        exact = [each for each in best if Choice(each.way, schemes.build(each.way)).training.is_exact]
        return list(dict.fromkeys([*best[:_PLANNED], *exact[:1]]))

    # -- on copies --------------------------------------------------------------------------------------------------

    def _estimated(self, way: str) -> _Estimate | None:
        """Return about what a way needs, from two copies of few blocks, or from the model itself if it has few."""
        try:
            base = self._base(way)
        except SpecError as error:  # what every plan has does not stand with it
            self.refused[way] = str(error)
            return None
        count = self._blocks()
        models = [with_blocks(self.case.model, copied) for copied in COPIES] if count else [self.case.model]
        choices = self._choices(base).of_blocks
        again = next((choice for choice in choices if "recomputation" in choice.changes), None)
        plan = Plan(rest=frozenset({again})) if again else Plan()
        cases = [plan.case(base.model_copy(update={"model": model}), Blocks().whole) for model in models]
        outcomes = dict(self.made.simulations(base, self.asked)(dict.fromkeys(cases, plan)))
        self._note(way, outcomes)
        told = [each for case in cases if (each := _need_and_seconds(outcomes.get(case))) is not None]
        return _Estimate(way, *_of_all(told, count)) if len(told) == len(cases) else None

    def _base(self, way: str) -> Case:
        """Return the case of the exact step with a way, and with the schemes that every plan has."""
        parts = (self.case.scheme, way) if self.case.scheme != "exact" else (way,)
        return self.case.model_copy(update={"scheme": schemes.build("+".join(parts)).spec})

    def _blocks(self) -> int:
        """Return how many blocks the model has; 0 if copies do not tell about it."""
        if self._count is None:
            outcome = self.made.simulated(self.case, self.case, self.asked)
            read = outcome.blocks if isinstance(outcome, Measurement) else None
            blocks = Blocks.of(read)
            self._count = len(blocks.paths) if blocks.copy_of(self.case.model) else 0
        return self._count

    def _note(self, way: str, outcomes: Mapping[Case, Outcome]) -> None:
        for outcome in outcomes.values():
            if not isinstance(outcome, Measurement):
                self.refused.setdefault(way, outcome.message)

    # -- of the whole model -----------------------------------------------------------------------------------------

    def _choices(self, base: Case) -> Choices:
        return replace(self.made.choices(base, self.asked), computing=())  # the way says in which type is computed

    def _planned(self, way: str, processes: int, levels: Sequence[Level]) -> Iterator[Sharded]:
        """Yield the fastest plan of each level with a way, unless one nearer to the exact step is as fast."""
        base = self._base(way)
        planner = self.made.planner(base, self.asked, self._choices(base))
        try:
            with self.made.searching(f"single changes with {way}", _OF_CHANGES):
                planner.run()
        except MeasurementError:
            if not self.made.budget.cut_short:
                raise
            self.knows_least = False  # there was no time for the exact step
            return
        planner.answer(base.memory_limit_bytes or 0, levels)
        exact, limit = planner.exact_step, base.memory_limit_bytes or 0
        self.least = min(self.least, *((float(each.need), each.case.scheme) for each in planner.found))
        if all(each.need > limit for each in planner.found):
            self.knows_least = self.knows_least and planner.knows_least
        fastest = math.inf
        for level in levels:
            best = planner.fastest(Goal(level, limit))
            if best is None or best.seconds > self.asked.max_slowdown * exact.seconds:
                continue
            record = self.made.store.find(best.case)
            if record is not None and best.seconds < fastest:
                fastest = best.seconds
                yield Sharded(way, processes, Tried(record, best.measured, best.seconds, exact.seconds))


def _of_all(told: Sequence[tuple[float, float]], count: int) -> tuple[float, float]:
    """Return the need and the time of all blocks from those of the copies; or of the model, if it was simulated."""
    if len(told) == 1:
        return told[0]
    few, more = COPIES
    need, seconds = (one + (two - one) * (count - few) / (more - few) for one, two in zip(*told, strict=True))
    return need, seconds


def _need_and_seconds(outcome: Outcome | None) -> tuple[float, float] | None:
    seconds = step_seconds_of(outcome)
    return (float(needed_bytes(outcome)), seconds) if isinstance(outcome, Measurement) and seconds else None
