"""Planners for tests, which simulate and measure in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actbench.measuring.failures import failure_of
from actbench.model.measured import Measurement, Outcome
from actbench.model.records import Case
from actbench.tools.fit.bench import Session
from actbench.tools.fit.plan import Plan, candidates_for
from actbench.tools.fit.planner import Planner

ANY_NUMBER = 10**15
"""Bytes, more than any step needs."""


def simulate(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
    """Simulate or measure cases in this process."""
    for case in plans:
        try:
            yield case, Session(case).memory()
        except Exception as error:
            yield case, failure_of(error)


def planner_of(
    model: str, schemes: Sequence[str], *, limit: int = ANY_NUMBER, profile: str = "a100-80gb", **settings: Any
) -> Planner:
    """Return a planner that knows what the schemes do to a model."""
    case = Case(
        model=model,
        meter="simulated",
        device_profile=profile,
        memory_limit_bytes=limit,
        gradient_quality=False,
        **settings,
    )
    planner = Planner(case, candidates_for(case, {}, names=schemes), simulate)
    planner.run()
    return planner


def measured(case: Case) -> Measurement:
    """Return the measurement of a case, simulated or not."""
    ((_, outcome),) = simulate({case: Plan()})
    assert isinstance(outcome, Measurement), outcome
    return outcome
