"""The answer of a fit: which plans are worth showing, and what is said of them in a few sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from actbench.errors import shortened
from actbench.model.contents import Content, content_of
from actbench.model.gradient import GRADIENTS
from actbench.model.measured import Measurement
from actbench.model.records import Case, Failure
from actbench.model.spec import parse_spec
from actbench.tools.fit.records import MARGIN, FitRecord, PlannedStep, Training, step_seconds_of, to_nine_digits
from actbench.units import counted, format_bytes

_ALIKE = 0.02  # share of a step's time; the errors of estimates are larger
_MANY_TIMES = 2  # from which on a ratio is told as such, not in percent
_NAMED = 8  # schemes that crashed; more are counted

USUAL: Final = (
    ("lora:16", "checkpoint", "chunked_loss:8"),
    ("qlora:16", "checkpoint", "chunked_loss:8"),
    ("checkpoint", "chunked_loss:8", "adam8bit:torchao"),
    ("lora:16", "checkpoint"),
    ("checkpoint", "adam8bit:torchao"),
    ("checkpoint",),
)
"""The schemes of each, those first that need least: on a slow machine the time may end before the others."""

_KNOWN: Final = frozenset(map(frozenset, USUAL))


def is_usual(spec: str, base: str) -> bool:
    """Whether a plan is a usual stack, with or without ``base``, which every plan has."""
    return frozenset(map(str, parse_spec(spec))) - set(map(str, parse_spec(base))) in _KNOWN


@dataclass(frozen=True, repr=False)
class Fitted:
    """All plans that were simulated for one exact step.

    Attributes:
        tried: The plans, the exact step among them, the fastest first.
        on_device: Records measured on a device, with failures.
    """

    exact: PlannedStep
    tried: tuple[PlannedStep, ...]
    on_device: tuple[FitRecord, ...] = ()

    @property
    def case(self) -> Case:
        """The case of the exact step."""
        return self.exact.record.case

    @property
    def max_slowdown(self) -> float:
        """The largest slowdown of the last request."""
        return self.exact.record.asked.max_slowdown

    @property
    def limit_bytes(self) -> int:
        """Memory that a step may use."""
        return self.exact.record.asked.limit_bytes or self.exact.measurement.memory_limit_bytes or 0

    @property
    def least(self) -> PlannedStep:
        """What needs least of all that was simulated."""
        return min(self.tried, key=lambda each: each.need_bytes)

    def has_room_for(self, tried: PlannedStep) -> bool:
        """Whether a plan needs no more than the limit."""
        return tried.need_bytes <= self.limit_bytes

    def nearest(self, *, adapters: bool = False) -> list[PlannedStep]:
        """Return three plans to show where none fits and is fast enough.

        These are the fastest of those that fit, or else those that need least.
        """
        similar = self._alike(adapters)
        return ([*filter(self.has_room_for, similar)] or sorted(similar, key=lambda each: each.need_bytes))[:3]

    def _alike(self, adapters: bool) -> list[PlannedStep]:
        own = self.exact.training.trained
        if adapters and own == "adapters":
            return []  # all plans train them
        return [each for each in self.tried if each.training.trained == ("adapters" if adapters else own)]

    def shortlist(self, *, adapters: bool = False) -> list[PlannedStep]:
        """Return the rows of a shortlist: the fastest plan that fits for each way of training.

        A plan that trains further from the exact step is left out unless it is faster by more than estimates may be
        off.
        """
        similar = filter(self.has_room_for, self._alike(adapters))
        fitting = [each for each in similar if each.slowdown <= self.max_slowdown]
        kept = worth_showing([(each.training, each.seconds) for each in fitting])
        return [each for place, each in enumerate(fitting) if place in kept]

    @property
    def plans(self) -> tuple[PlannedStep, ...]:
        """The fastest plan that fits for each way of training, the fastest first, then those with adapters.

        Empty if nothing fits within the allowed slowdown.
        """
        return (*self.shortlist(), *self.shortlist(adapters=True))

    @property
    def fits(self) -> bool:
        """Whether some plan fits and is fast enough."""
        return bool(self.plans)

    def listed(self) -> list[PlannedStep]:
        """Return the rows of a table: both shortlists, or else what is nearest to them."""
        return [*self.plans] or [*self.nearest(), *self.nearest(adapters=True)]

    def usual(self) -> list[PlannedStep]:
        """Return the usual stacks that were simulated, and the exact step, the fastest first."""
        base = self.exact.record.asked.scheme
        similar = (each for each in self.tried if each.optimizer == self.exact.optimizer)
        return [each for each in similar if each is self.exact or is_usual(each.spec, base)]

    def uniform(self, *, exact: bool) -> PlannedStep | None:
        """Return the fastest plan that fits and does the same with all blocks, of exact or of any gradients."""
        return next((each for each in filter(self.has_room_for, self._comparable(exact)) if each.is_uniform), None)

    def frontier(self, *, exact: bool = True) -> list[PlannedStep]:
        """Return the plans that no other undercuts in both bytes and time, the fastest first.

        With ``exact`` gradients are exact; updates, precision and trained parameters are in any case.
        """
        front: list[PlannedStep] = []
        for each in self._comparable(exact):
            if not front or each.need_bytes < front[-1].need_bytes:
                front.append(each)
        return front

    def _comparable(self, exact: bool) -> list[PlannedStep]:
        """Return the plans with the exact step's parameters, updates and precision, the fastest first."""
        furthest = self.exact.training.model_copy(update={} if exact else {"gradient": GRADIENTS[-1]})
        return [each for each in self.tried if each.training.is_as_near(furthest)]


def worth_showing(plans: Sequence[tuple[Training, float]]) -> set[int]:
    """Return the places of the plans, each with its seconds, that no other one replaces that trains as near."""
    nearer = [sum(two != one and two.is_as_near(one) for two, _ in plans) for one, _ in plans]
    kept = set[int]()
    for place in sorted(range(len(plans)), key=lambda place: (nearer[place], plans[place][1])):
        if not any(replaces(plans[other], plans[place]) for other in kept):
            kept.add(place)
    return kept


def replaces(one: tuple[Training, float], other: tuple[Training, float]) -> bool:
    """Whether a plan that trains as near as another one is about as fast: estimates may be off by more."""
    (near, seconds), (training, others) = one, other
    return near.is_as_near(training) and seconds <= (1 + _ALIKE * (near != training)) * others


def fitted(records: Iterable[FitRecord]) -> list[Fitted]:
    """Return the simulated plans of each exact step in the records."""
    groups: dict[tuple[Case, Content], list[FitRecord]] = {}
    exact: dict[tuple[Case, Content], FitRecord] = {}
    of_plans = (record for record in records if not record.of_copy)
    for record in chain.from_iterable(each.of_requests() for each in of_plans):
        asked = record.asked
        limit = asked.limit_bytes or record.case.memory_limit_bytes
        of_exact = {"scheme": asked.scheme, "optimizer": asked.optimizer, "memory_limit_bytes": limit}
        what = record.case.model_copy(update={"meter": "simulated", **of_exact}), content_of(record)
        groups.setdefault(what, []).append(record)
        if record.case == what[0]:
            exact[what] = record
    return [found for what, group in groups.items() if what in exact and (found := _fitted(exact[what], group))]


def _fitted(exact: FitRecord, records: Sequence[FitRecord]) -> Fitted | None:
    seconds = step_seconds_of(exact.outcome)
    if seconds is None or not isinstance(exact.outcome, Measurement):
        return None
    blocks = tuple(block.path for block in exact.outcome.blocks.blocks) if exact.outcome.blocks else ()
    least: dict[Case, PlannedStep] = {}  # a plan that was simulated for several budgets needs least with the smallest
    most = exact.asked.max_gradient_error
    for record in records:
        error = 0.0 if most is None or record.case == exact.case else record.gradient_error
        time = step_seconds_of(record.outcome) if error is not None and MARGIN * error <= (most or 0.0) else None
        if isinstance(record.outcome, Measurement) and time is not None:
            asked = record.model_copy(update={"asked": exact.asked})  # the last request may not have tried it again
            tried, plan = PlannedStep(asked, record.outcome, time, seconds, blocks), without_limit(record.case)
            if plan not in least or _excess(tried) < _excess(least[plan]):
                least[plan] = tried
    in_order = tuple(sorted(least.values(), key=lambda each: (to_nine_digits(each.seconds), each.need_bytes)))
    on_device = tuple(record for record in records if record.case.meter != "simulated")
    return Fitted(least[without_limit(exact.case)], in_order, on_device)


def _excess(tried: PlannedStep) -> tuple[bool, int]:
    """Return whether a plan needed more than its simulation allowed, and its need."""
    limit = tried.record.case.memory_limit_bytes
    return limit is not None and tried.need_bytes > limit, tried.need_bytes


def without_limit(case: Case) -> Case:
    """Return a case without a memory limit: a plan is the same at all budgets."""
    return case.model_copy(update={"memory_limit_bytes": None})


# -- sentences -------------------------------------------------------------------------------------------------------


def answer(found: Fitted) -> tuple[str, ...]:
    """Return a sentence if the model fits unchanged, and at most three about what else fits and is fast enough.

    If nothing does, the sentence is about what comes nearest.
    """
    base, sentences = found.exact.record.asked.scheme, []
    if found.has_room_for(found.exact):
        what = "unchanged" if base == "exact" else f"with {base} alone"
        sentences = [f"It fits {what}: {_memory(found.exact, found)}."]
    return (*sentences, *(_sentence(each, found) for each in _plans_of_answer(found))) or nearest(found)


def numbered(found: Fitted) -> list[PlannedStep]:
    """Return all plans in tables by their numbers, those that the answer names first, then those of both shortlists.

    What changes nothing has no number.
    """
    first = [*_plans_of_answer(found), *found.plans] or [*filter(found.has_room_for, found.tried)][:1]
    return [each for each in dict.fromkeys([*first, *found.listed()]) if not each.is_unchanged]


def _plans_of_answer(found: Fitted) -> list[PlannedStep]:
    """Return the plans that an answer names, in its order; each is in a table below it. The exact step is left out."""
    shown, adapted = found.shortlist(), found.shortlist(adapters=True)
    plans = shown or adapted
    exact = [each for each in plans if each.training.is_exact]
    same = [each for each in plans if each.gradient == "exact"]
    chosen = [*[*exact, *same, *plans][:1], *shown[:1]]
    chosen += [each for each in adapted[:1] if not shown or each.seconds < shown[0].seconds]
    return [each for each in dict.fromkeys(chosen) if each is not found.exact]


def _sentence(plan: PlannedStep, found: Fitted) -> str:
    training = plan.training
    other = [what for what in ("updates", "precision") if getattr(training, what) == "other"]
    has = " and ".join([f"{training.gradient} gradients", *([f"other {' and '.join(other)}"] if other else [])])
    trains = f"trains adapters with {has}" if training.trained == "adapters" else f"has {has}"
    number = 1 + numbered(found).index(plan)
    percent = round(100 * (plan.slowdown - 1))
    time = f"{abs(percent)} % {'more' if percent > 0 else 'less'} time" if percent else "the same time"
    if plan.slowdown >= _MANY_TIMES:
        time = f"{times(plan.slowdown)} the time"
    return f"Plan {number} needs {_memory(plan, found)} and {time} (estimated), and {trains}: {plan.words}."


def times(ratio: float) -> str:
    """Return a ratio in words: ``twice``, ``2.5 times``."""
    return "twice" if ratio == _MANY_TIMES else f"{ratio:.3g} times"


def _memory(plan: PlannedStep, found: Fitted) -> str:
    return f"{format_bytes(plan.need_bytes)} of {format_bytes(found.limit_bytes)}"


def nearest(found: Fitted) -> tuple[str, ...]:
    """Return the sentences about what comes nearest where no plan fits and is fast enough."""
    for fastest in filter(found.has_room_for, found.tried):
        return f"Nothing fits within {times(found.max_slowdown)} the exact step's time.", _sentence(fastest, found)
    least, limit = found.least, format_bytes(found.limit_bytes)
    needs = f"{least.words} needs least of them, {format_bytes(least.need_bytes)}"
    return (f"No plan that was simulated fits in {limit}; {needs}.",)


def about_crashed(crashed: Mapping[Case, Failure], path: Path | None) -> tuple[str, ...]:
    """Return the line that says which simulations crashed, and why the first did; none if none crashed."""
    if not crashed:
        return ()
    why = next(iter(crashed.values())).message.strip().partition("\n")[0]  # what torch adds fills pages
    see = f"; see {path}" if path is not None else ""
    whose = "your script" if next(iter(crashed)).script is not None else "your model"
    kinds = dict.fromkeys("+".join(part.name for part in parse_spec(case.scheme)) for case in crashed)
    more = f" and {len(kinds) - _NAMED} more" if len(kinds) > _NAMED else ""
    count, names = counted(len(crashed), "simulation"), ", ".join([*kinds][:_NAMED])
    said = f"{count} crashed, a fault of actbench and not of {whose}, so plans may be missing: {names}{more}"
    return (f"{said}. The first: {shortened(why).rstrip('.')}{see}",)
