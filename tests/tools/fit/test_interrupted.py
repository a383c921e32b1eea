"""Plans when simulations are missing: time ended, one took too long, or a combination is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
from surveyed import simulate

from actbench.errors import MeasurementError
from actbench.machine import provenance
from actbench.model.measured import Outcome
from actbench.model.records import Case, Failure, FailureReason
from actbench.run.executor import Told
from actbench.tools.fit.budget import Budget
from actbench.tools.fit.plan import Plan, candidates_for
from actbench.tools.fit.planner import Goal, Planner
from actbench.tools.fit.records import EXACT, LEVELS, Asked
from actbench.tools.fit.simulations import Means, simulations

SCHEMES = ("checkpoint", "msln", "pure", "lora:4", "accumulate:2")
LIMIT = 10**12


class Simulated:
    """Simulates each case once for all tests."""

    def __init__(self) -> None:
        self.known: dict[Case, Outcome] = {}

    def __call__(self, plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, plan in plans.items():
            if case not in self.known:
                self.known.update(simulate({case: plan}))
            yield case, self.known[case]


SIMULATED = Simulated()


def planner(model: str, simulates: object) -> Planner:
    case = Case(
        model=model,
        sequence_length=128,
        batch_size=8,
        meter="simulated",
        device_profile="a100-80gb",
        memory_limit_bytes=LIMIT,
        gradient_quality=False,
    )
    return Planner(case, candidates_for(case, {}, names=SCHEMES), simulates)  # type: ignore[arg-type]


def after(count: int, seen: list[Case]) -> object:
    """Return what simulates ``count`` cases, and nothing more."""

    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, outcome in SIMULATED(plans):
            if len(seen) >= count:
                return
            seen.append(case)
            yield case, outcome

    return simulates


@pytest.mark.exhaustive
def test_time_may_end_after_any_simulation() -> None:
    whole = planner("tiny-llama@num_hidden_layers=8", SIMULATED)
    whole.start()
    whole.begin()
    whole.answer(LIMIT, LEVELS)
    whole.look_further()
    whole.answer(LIMIT, LEVELS)
    needed = len(whole.outcomes)
    assert needed > 15

    for count in range(needed):
        seen: list[Case] = []
        stopped = planner("tiny-llama@num_hidden_layers=8", after(count, seen))
        if count == 0:
            with pytest.raises(MeasurementError, match="give a larger --budget"):
                stopped.run()
            continue
        stopped.start()
        stopped.begin()
        stopped.answer(1, LEVELS)  # nothing fits
        stopped.look_further()
        stopped.answer(1, LEVELS)
        stopped.frontiers(LEVELS[:2])
        assert len(seen) == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_machine_too_slow_to_learn_all_still_makes_plans(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("actbench.tools.fit.budget.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slowly(
        cases: Sequence[Case], may_begin: Callable[[], bool], _: Callable[[], bool]
    ) -> Generator[Told, None, None]:
        for case in cases:
            if may_begin():
                clock[0] += 1
                yield case, next(outcome for _, outcome in SIMULATED({case: Plan()})), provenance("")

    slow = planner("tiny-llama@num_hidden_layers=8", SIMULATED)
    with simulations("slow", slow.exact, slow.candidates, Means(jobs=1, budget_seconds=5)) as made:
        made.simulator = slowly
        slow.simulate = made.of(slow.exact, Asked())
        with made.budget.share("changes", share):
            slow.start()
            slow.begin()
        assert clock[0] == int(share * 5) + 1
        slow.answer(round(0.8 * slow.exact_step.need), LEVELS)

    assert any(each.plan.peak > 0 for each in slow.found)


@pytest.mark.slow
def test_the_budget_ends_a_case_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("actbench.tools.fit.budget.time", SimpleNamespace(monotonic=lambda: clock[0]))

    def hangs(
        cases: Sequence[Case], may_begin: Callable[[], bool], may_go_on: Callable[[], bool]
    ) -> Generator[Told, None, None]:
        if may_begin():
            while may_go_on():
                clock[0] += 1
        yield from ()

    hung = planner("tiny-llama@num_hidden_layers=8", SIMULATED)
    with simulations("hung", hung.exact, hung.candidates, Means(jobs=1, budget_seconds=80)) as made:
        made.simulator = hangs
        hung.simulate = made.of(hung.exact, Asked())
        with pytest.raises(MeasurementError, match="give a larger --budget"):
            hung.start()

    assert 80 < clock[0] <= 101
    assert made.budget.cut_short == ["plans"]


def failing(reason: FailureReason, failed: list[Case]) -> object:
    """Return what fails at the first plan that does not do the same with all blocks."""

    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, plan in plans.items():
            if case in failed or (not failed and not plan.is_uniform):
                failed.append(case)
                yield case, Failure(reason=reason, message="made up")
            else:
                yield from SIMULATED({case: plan})

    return simulates


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("reason", ["timeout", "nothing-converted"])
def test_a_plan_that_fails_takes_no_other_with_it(reason: FailureReason) -> None:
    failed: list[Case] = []
    made = planner("tiny-llama@num_hidden_layers=4", failing(reason, failed))
    made.is_joining = False
    made.run()
    exact, least = made.space.solve(EXACT, LIMIT), made.space.least(EXACT)
    assert exact is not None
    assert least is not None
    smallest = made.tried([least], LIMIT)
    assert smallest is not None
    between = Goal(EXACT, (made.exact_step.need + smallest.need) // 2)  # needs, since of so few bytes most are lost

    made.pursue([between])

    assert failed
    found = made.fastest(Goal(EXACT, LIMIT))
    assert found is not None
    after_it = made.space.least(EXACT)
    assert after_it is not None
    if reason == "timeout":
        assert after_it.peak == least.peak  # nothing was left out
    else:
        assert made.fastest(between) is not None  # by another plan
        assert any("checkpoint" in choice.name for choice in after_it.candidates)


@pytest.mark.slow
def test_a_plan_is_simulated_within_its_smallest_limit_if_that_tells_of_the_larger_ones() -> None:
    made = planner("tiny-llama@num_hidden_layers=4", SIMULATED)
    made.run()
    before, goals = len(made.found), [Goal(EXACT, made.exact_step.need - less) for less in (2, 4, 3)]

    made.pursue(goals)

    plans = [each.plan for each in made.found[before:]]
    fastest = {each.plan: each.limit for goal in goals if (each := made.fastest(goal)) is not None}
    assert len(plans) == len(set(plans)) > 0
    assert list(fastest.values()) == [min(goal.limit for goal in goals)]


def test_what_has_nothing_to_do_in_the_model_is_not_tried_in_other_ways_of_computing() -> None:
    made = planner("tiny-gpt2@n_layer=2", SIMULATED)
    made.candidates = candidates_for(made.exact, {}, names=("checkpoint", "lora:4,target=missing", "autocast"))

    made.run()

    schemes = [case.scheme for case in made.outcomes]
    assert "autocast:bfloat16" in schemes
    assert sum("missing" in scheme for scheme in schemes) == 1


@pytest.mark.slow
def test_what_is_refused_only_beside_another_change_stays_possible() -> None:
    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, plan in plans.items():
            if "lora" in case.scheme and "msln" in case.scheme:
                yield case, Failure(reason="unsupported", message="made up")
            else:
                yield from SIMULATED({case: plan})

    made = planner("tiny-llama@num_hidden_layers=4", simulates)

    made.run()

    assert not [choice for choice in made.refused if choice.name == "msln"]


@pytest.mark.parametrize("refused", ["", "chunked_loss"])
def test_usual_stacks_are_tried_as_far_as_they_can_be(refused: str) -> None:
    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, plan in plans.items():
            if refused and refused in case.scheme:
                yield case, Failure(reason="nothing-converted", message="made up")
            else:
                yield from SIMULATED({case: plan})

    made = planner("tiny-llama@num_hidden_layers=2", simulates)
    made.candidates = candidates_for(made.exact, {}, names=("checkpoint", "chunked_loss:8", "lora:16", "msln"))
    made.start()

    made.try_usual()

    tried = [case.scheme for case in made.outcomes]
    assert tried[:2] == ["exact", "lora:16+chunked_loss:8+checkpoint"]
    assert set(tried[2:]) == {"lora:16+checkpoint", "checkpoint"}
    assert all(each.plan.is_uniform for each in made.found)
    assert [each.case.scheme for each in made.found] == [name for name in tried if not refused or refused not in name]


@pytest.mark.slow
def test_what_is_certain_to_be_wanted_is_simulated_beside_what_has_to_be_known_first() -> None:
    waves: list[list[str]] = []

    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        if plans:
            waves.append([f"{case.model.partition('=')[2]} {case.scheme}" for case in plans])
        yield from SIMULATED(plans)

    made = planner("tiny-llama@num_hidden_layers=8", simulates)

    made.run()

    first, copies, singles, larger, *_ = (set(wave) for wave in waves)
    assert first == {"8 exact"}
    assert copies == {"4 exact", "6 exact"}
    assert singles >= {"4 checkpoint", "4 accumulate:2", "4 lora:4", "4 pure:bfloat16"}
    assert larger >= {"6 accumulate:2", "4 pure:bfloat16+lora:4"}
    told = [each for wave in waves for each in wave]
    assert len(told) == len(set(told))


@pytest.mark.slow
def test_what_there_was_no_time_for_ahead_is_simulated_where_it_is_needed() -> None:
    is_over: list[bool] = [True]

    def simulates(plans: Mapping[Case, Plan]) -> Iterator[tuple[Case, Outcome]]:
        for case, outcome in SIMULATED(plans):
            if not (is_over[0] and ("lora" in case.scheme or "pure" in case.scheme)):
                yield case, outcome

    made = planner("tiny-llama@num_hidden_layers=8", simulates)
    made.start()
    made.begin()
    is_over[0] = False

    made.look_further()

    assert any("lora:4" in {each.name for each in way.around} for way in made.space.ways)


def test_searches_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("actbench.tools.fit.budget.time", SimpleNamespace(monotonic=lambda: clock[0]))
    budget = Budget(80)

    with budget.share("stacks", 0.5):
        clock[0] = 110
        with budget.share("changes", 0.5):
            assert budget.left_seconds == 15
            clock[0] = 126
            assert not budget.may_begin()
            assert budget.may_go_on()  # for a quarter of all time
        assert budget.may_begin()
        assert budget.left_seconds == 14
    assert budget.left_seconds == 54
    clock[0] = 201
    assert not budget.may_begin()
    assert not budget.may_go_on()

    assert budget.cut_short == ["changes", "plans"]
    assert "after 80 s (--budget), before it had tried all changes and plans; run the same command" in budget.reason


def test_without_a_limit_no_search_is_cut_short() -> None:
    budget = Budget(None)

    with budget.share("stacks", 0.5):
        assert budget.may_begin()

    assert not budget.reason


def test_the_first_interrupt_ends_the_search_and_the_second_the_command() -> None:
    budget = Budget(600)

    with budget.share("plans"), budget.stoppable():
        signal.raise_signal(signal.SIGINT)
        assert not budget.may_begin()
        assert not budget.may_go_on()
        assert budget.left_seconds == 0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert "stopped by Ctrl-C, before it had tried all plans; run the same command again" in budget.reason
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
