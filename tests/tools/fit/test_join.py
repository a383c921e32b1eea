"""Plans are joined from traces, and simulated whole before they are told."""

from __future__ import annotations

import pytest
from surveyed import planner_of

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.tools.fit.plan import Plan
from actbench.tools.fit.planner import Goal
from actbench.tools.fit.records import ANY

SCHEMES = ("checkpoint", "actnn:L2", "accumulate:2")


def test_plans_are_joined_and_then_proved() -> None:
    planner = planner_of("tiny-llama@num_hidden_layers=3", SCHEMES, batch_size=16, sequence_length=64)
    told: list[Case] = []
    planner.note = lambda case, plan, measured: told.append(case)
    exact = planner.exact_step
    simulated = len(planner.outcomes)
    needs = [each.need for each in planner.found]
    goals = [Goal(ANY, round(min(needs) + share * (exact.need - min(needs)))) for share in (0.3, 0.6, 0.9)]

    planner.pursue(goals)

    joined = [each for each in planner.found if each.is_joined]
    assert [each.case for each in joined] == told
    assert joined
    assert all(not each.plan.actions or not each.plan.is_uniform for each in joined)
    # all else that was simulated meanwhile is what plans are joined from
    others = [case for case in [*planner.outcomes][simulated:] if case not in told]
    assert all(",only=" not in case.scheme or case.scheme.count("only=") == 1 for case in others)

    proved = planner.unproved(told)
    # of a plan that changes no block, the trace is that of its own simulation
    assert proved == [each for each in joined if any(each.plan.actions)]

    for replayed in (each for each in joined if each not in proved):
        simulated_at = next(each for each in planner.found if each.plan == replayed.plan and not each.is_joined)
        assert replayed.seconds == pytest.approx(simulated_at.seconds, rel=1e-9)  # in micro-batches, too

    planner.prove(proved)

    assert not planner.unproved(told)
    assert len(planner.errors) == len(proved)
    assert max(map(abs, planner.errors)) < 0.003
    for before in proved:
        whole = planner.outcomes[before.case]
        assert isinstance(whole, Measurement)
        assert before.measured.estimated is not None
        assert whole.estimated is not None
        # an estimate of the whole step, with the operators of all micro-batches
        assert abs(before.measured.estimated.step_seconds / whole.estimated.step_seconds - 1) < 0.01


def test_without_traces_plans_are_simulated_whole() -> None:
    planner = planner_of("tiny-llama@num_hidden_layers=2", ("checkpoint",), batch_size=4, sequence_length=32)
    planner.is_joining = False
    chosen = next(action for action in planner.space.ways[0].actions if action)
    plan = Plan(actions=(chosen, frozenset()))
    found = planner.tried([each for each in planner.space.of_some(ANY, 1 << 60) if each == plan], 1 << 60)

    assert found is not None
    assert not found.is_joined
