"""On which cards a step fits, and how fast it is there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.report.advice import needed_bytes
from actbench.simulator import profiles
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.fit.fitting import Fitting
from actbench.tools.fit.levels import Level
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.planner import Found, Goal, Planner
from actbench.tools.fit.records import Asked, Tried, step_seconds_of

_OF_CHANGES, _OF_PLANS = 0.3, 0.5  # shares of the time that is left; the rest is for the plans on each card
_TRIED = 2  # plans of a way of training that are simulated for a card: another may be faster there


@dataclass(frozen=True)
class OnCard:
    """The fastest plan of a way of training on a card.

    Attributes:
        training: The way of training.
    """

    profile: DeviceProfile
    training: str
    tried: Tried


@dataclass
class Cards:
    """Plans of one model for many cards.

    Attributes:
        made: What simulates.
        case: The case of the exact step, on the device that plans are made for.
        asked: What counts as an answer.
        without: Cards on which nothing fits, each with the bytes of what needs least.
        untried: Cards for which nothing was found before the time was over.
    """

    made: Fitting
    case: Case
    asked: Asked
    without: dict[str, int] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)

    def run(self, levels: Sequence[tuple[str, Level]]) -> list[OnCard]:
        """Return what fits, the smallest card first.

        Raises:
            MeasurementError: The exact step cannot be simulated.
        """
        cards = [each for each in profiles.profiles() if each.rates is not None and each.is_cuda]
        cards.sort(key=lambda each: each.memory_bytes)
        planner = self.made.planner(self.case, self.asked)
        with self.made.searching("single changes", _OF_CHANGES):
            planner.run()
        with self.made.searching("plans", _OF_PLANS):
            planner.pursue([Goal(level, card.step_bytes()) for card in cards[1:] for _, level in levels], rounds=2)
            planner.answer(cards[0].step_bytes(), [level for _, level in levels])  # or what needs least, if none fits
        rows = list[OnCard]()
        for card in cards:
            with self.made.searching("plans on each card"):
                found = list(self._on(card, planner, levels))
            rows += found
            if not found and self.made.budget.cut_short:
                self.untried.append(card.name)
            elif not found:
                self.without[card.name] = min(each.need for each in planner.found)
        return rows

    def _on(self, card: DeviceProfile, planner: Planner, levels: Sequence[tuple[str, Level]]) -> Iterator[OnCard]:
        """Yield the fastest plans on a card; one that trains further from the exact step has to be faster."""
        chosen = {name: self._candidates(card, planner, level) for name, level in levels}
        if not any(chosen.values()):
            return
        settings = {"device_profile": card.name, "memory_limit_bytes": card.step_bytes()}
        exact = self.case.model_copy(update=settings)
        cases = {each.case.model_copy(update=settings): each.plan for found in chosen.values() for each in found}
        outcomes = dict(self.made.simulations(exact, self.asked)({exact: Plan(), **cases}))
        seconds = step_seconds_of(outcomes.get(exact))
        if seconds is None:
            return
        fastest = math.inf
        for name, found in chosen.items():
            cases_of_level = (each.case.model_copy(update=settings) for each in found)
            tried = (self._tried(case, outcomes.get(case), card, seconds) for case in cases_of_level)
            best = min((each for each in tried if each is not None), key=lambda each: each.seconds, default=None)
            if best is not None and (best.seconds < fastest or best.training.trained == "adapters"):
                fastest = min(fastest, best.seconds)
                yield OnCard(card, name, best)

    def _candidates(self, card: DeviceProfile, planner: Planner, level: Level) -> list[Found]:
        """Return the fastest simulated plans that a card has memory and types for."""
        fits = [
            each
            for each in planner.reaching(Goal(level, card.step_bytes()))
            if card.has_tensor_float or not any(choice.needs_bfloat16 for choice in each.plan.choices)
        ]
        return fits[:_TRIED]

    def _tried(self, case: Case, outcome: Outcome | None, card: DeviceProfile, exact_seconds: float) -> Tried | None:
        """Return a simulated plan; None if it does not fit on a card, or is too slow there."""
        record, seconds = self.made.store.find(case), step_seconds_of(outcome)
        if not isinstance(outcome, Measurement) or record is None or seconds is None:
            return None
        if needed_bytes(outcome) > card.step_bytes() or seconds > self.asked.max_slowdown * exact_seconds:
            return None
        return Tried(record, outcome, seconds, exact_seconds)
