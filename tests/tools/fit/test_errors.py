"""Errors of the gradient: squares add over blocks and changes, a small model tells of a large one, no plan has more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from surveyed import ANY_NUMBER, measured, planner_of

import actbench
from actbench.measuring.gradients import gradients_of, relative_error_and_cosine
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.tools.fit.errors import Errors
from actbench.tools.fit.fit import find
from actbench.tools.fit.plan import AS_IT_IS, Action, Plan, candidates_for
from actbench.tools.fit.planner import Goal, Planner
from actbench.tools.fit.records import ANY, MARGIN, Asked
from actbench.tools.fit.simulations import Means
from actbench.tools.fit.space import Space
from actbench.workload import load_workload

ROBERTA = "tiny-roberta@num_hidden_layers=4"


@pytest.fixture(scope="module")
def planner() -> Planner:
    planner = planner_of(ROBERTA, ("actnn:L2", "fewbit:2", "checkpoint"), batch_size=16, sequence_length=64)
    planner.limit_error(ANY_NUMBER)
    return planner


def tight(planner: Planner) -> float:
    """Return a limit of memory that exact plans can be within, at a price."""
    least = within(planner, 0.0).least(ANY)
    assert least is not None
    return least.peak + 0.3 * (planner.space.ways[0].exact.peak - least.peak)


def within(planner: Planner, most_squared_error: float) -> Space:
    """Return the space of a planner with a limit of the error."""
    planner.space.know(planner.space.errors, most_squared_error)
    return planner.space


def error_of(plan: Plan, planner: Planner, rows: int = 4) -> float:
    """Measure a plan's error on the cpu meter; errors of parts were measured with 4 rows, too."""
    case = plan.case(planner.exact, planner.space.blocks.whole)
    settings = {"meter": "cpu", "device_profile": None, "gradient_quality": True, "batch_size": rows}
    found = measured(case.model_copy(update=settings))
    assert found.gradient_error is not None
    return found.gradient_error


def square_of(plan: Plan, planner: Planner, draws: int = 8) -> float:
    """Return the mean square of a plan's error over draws of its noise, of which one is off by up to a tenth."""
    case = plan.case(planner.exact, planner.space.blocks.whole).model_copy(
        update={"meter": "cpu", "device_profile": None, "batch_size": 4}
    )
    workload = load_workload(case)
    torch.manual_seed(case.seed)
    setup = workload.setup(materialize=True, seed=case.seed)
    batch = workload.batch(case.batch_size, seed=case.seed)
    exact = [gradients_of(setup, batch, draw) for draw in range(draws)]  # each with the dropout of the draw
    applied = actbench.apply(setup, case.scheme)
    errors = [relative_error_and_cosine(gradients_of(applied, batch, draw), exact[draw])[0] for draw in range(draws)]
    return statistics.fmean(error**2 for error in errors)


def each_alone(actions: Sequence[Action]) -> list[Plan]:
    """Return the plans that do with one block what ``actions`` do, and leave the others as they are."""
    return [
        Plan(actions=tuple(action if here == place else AS_IT_IS for here, action in enumerate(actions)))
        for place, changed in enumerate(actions)
        if any(choice.name != "checkpoint" for choice in changed)
    ]


def action_of(planner: Planner, name: str) -> Action:
    return frozenset(choice for choice in planner.candidates.of_blocks if choice.name == name)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "names",
    [
        ("actnn:L2", "", "", ""),
        ("fewbit:2", "", "checkpoint", "actnn:L2"),
        ("fewbit:2", "fewbit:2", "actnn:L2", "actnn:L2"),
        ("checkpoint", "actnn:L2", "fewbit:2", "fewbit:2"),
    ],
)
def test_a_plans_error_is_the_root_of_the_sum_of_squares(planner: Planner, names: tuple[str, ...]) -> None:
    plan = Plan(actions=tuple(action_of(planner, name) for name in names))

    expected = math.fsum(square_of(alone, planner) for alone in each_alone(plan.actions))

    assert math.sqrt(square_of(plan, planner)) == pytest.approx(math.sqrt(expected), rel=0.1)
    assert error_of(plan, planner) == pytest.approx(math.sqrt(planner.space.errors.of(plan)), rel=0.2)  # of one draw


@pytest.mark.exhaustive
def test_squares_add_for_packed_tensors_and_random_sketches(planner: Planner) -> None:
    found = candidates_for(planner.exact, {}, names=("gact:L2", "randomized:0.5")).of_blocks
    gact, sketched = (frozenset({candidate}) for candidate in found)

    for actions in ((gact,) * 4, (sketched,) * 4, (gact, AS_IT_IS, sketched, gact), (gact, gact, AS_IT_IS, gact)):
        assert math.sqrt(square_of(Plan(actions=actions), planner)) == pytest.approx(
            math.sqrt(math.fsum(square_of(alone, planner) for alone in each_alone(actions))), rel=0.1
        )


@pytest.mark.slow
@pytest.mark.parametrize("most", [0.003, 0.01, 0.03, 0.1])
def test_plans_keep_the_limit_when_they_are_measured(planner: Planner, most: float) -> None:
    limit = tight(planner)
    found = within(planner, (most / MARGIN) ** 2).solve(ANY, limit)

    assert found is not None
    assert error_of(found, planner, rows=planner.exact.batch_size) <= most


@pytest.mark.slow
def test_a_smaller_limit_is_no_faster_and_none_is_exact(planner: Planner) -> None:
    limit = tight(planner)

    found = [within(planner, most**2).solve(ANY, limit) for most in (0.0, 0.003, 0.01, 0.03, 0.1, math.inf)]

    seconds = [each.seconds for each in found if each is not None]
    assert len(seconds) == len(found)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    first = found[0]
    assert first is not None
    assert first.training().is_exact


@pytest.mark.slow
def test_what_is_exact_is_not_measured(planner: Planner) -> None:
    errors = planner.space.errors

    assert not any(choice.name == "checkpoint" for action in errors.of_blocks for choice in action if len(action) == 1)
    assert errors.of(Plan(actions=(action_of(planner, "checkpoint"),) * 4)) == 0.0
    assert all(len(each) == 4 for each in errors.of_blocks.values())


@pytest.mark.slow
def test_changes_without_a_known_error_are_in_no_plan(planner: Planner) -> None:
    fewbit, start = action_of(planner, "fewbit:2"), planner.space.errors
    try:
        planner.space.know(Errors(of_blocks={**start.of_blocks, fewbit: [math.inf] * 4}))
        limit = tight(planner)
        found = [within(planner, 1.0).solve(ANY, share * limit) for share in (1.0, 1.2, 1.4)]
    finally:
        planner.space.know(start)

    assert all(each is not None and fewbit not in each.actions for each in found)


def test_what_was_surveyed_and_dropped_has_an_unknown_error() -> None:
    planner = planner_of("tiny-roberta", ("fewbit:2",), batch_size=2, sequence_length=16)
    fewbit = action_of(planner, "fewbit:2")
    (way,) = planner.space.ways
    del way.actions[fewbit]
    (surveyed,) = (each for each in planner.found if set(each.plan.actions) == {fewbit} and not each.plan.rest)
    planner.found[:] = [surveyed]
    goal = Goal(ANY, surveyed.need)
    assert planner.fastest(goal) is surveyed

    planner.limit_error(ANY_NUMBER)
    assert planner.space.errors.of(Plan()) == 0.0
    assert planner.space.errors.of(surveyed.plan) == planner.space.errors.outside([], fewbit) == math.inf
    assert planner.space.errors.outside(fewbit, frozenset()) == math.inf
    within(planner, 1.0)
    assert planner.fastest(goal) is None


def test_models_that_cannot_be_measured_have_exact_plans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of("tiny-roberta", ("fewbit:2", "checkpoint"), batch_size=2, sequence_length=16)
    kept = planner.simulate
    planner.simulate = lambda plans: kept({case: plan for case, plan in plans.items() if case.meter == "simulated"})
    planner.limit_error(0.1)

    assert planner.space.errors.measured_on == ""
    assert any("fewbit:2" in text for text in planner.space.errors.remarks())
    found = planner.space.solve(ANY, ANY_NUMBER)
    assert found is not None
    assert found.training().is_exact
    assert planner.space.least(ANY) is not None


@pytest.mark.exhaustive
def test_blocks_that_differ_are_measured_a_few_in_a_row() -> None:
    model = "resnet18-cifar"
    planner = planner_of(model, ("actnn:L2",), batch_size=8)
    planner.limit_error(ANY_NUMBER)
    errors = planner.space.errors
    actnn = action_of(planner, "actnn:L2")
    whole = Plan(actions=(actnn,) * len(planner.space.blocks.paths))

    stand_in = Case(
        model=model, batch_size=4, meter="cpu", scheme=whole.case(planner.exact, planner.space.blocks.whole).scheme
    )
    found = measured(stand_in)

    assert isinstance(found, Measurement)
    assert found.gradient_error == pytest.approx(math.sqrt(errors.of(whole)), rel=0.1)


@pytest.mark.exhaustive
def test_a_fit_stores_what_it_measured_and_lists_no_plan_over_the_limit(tmp_path: Path) -> None:
    case = Case(
        model=ROBERTA, batch_size=16, sequence_length=64, device_profile="a100-80gb", memory_limit_bytes=15 * 2**20
    )
    asked = Asked(max_gradient_error=0.02)
    means = Means(tmp_path, schemes=["fewbit:2", "checkpoint"], budget_seconds=None)

    first = find(case, asked, means)
    assert first.path is not None
    lines = first.path.read_text()
    again = find(case, asked, means)

    assert (again.whole, again.copies) == (0, 0)
    assert first.path.read_text() == lines
    assert '"meter":"cpu"' in lines
    assert any("measured on the CPU" in text for text in again.kept)
    errors = [each.record.gradient_error for each in again.tried]
    assert all(error is not None and MARGIN * error <= 0.02 for error in errors)
    assert again.exact.record.gradient_error == 0
    without = find(case, Asked(), means)
    assert len(without.tried) >= len(again.tried)
