"""Which of the plans that were simulated are worth showing."""

from __future__ import annotations

from typing import Literal

import pytest
from madeup import GIB, OTHER_UPDATES, Plan, found, record_of

from actbench.tools.fit.answer import answer as fit_answer, fitted
from actbench.tools.fit.records import Training


def shown(*plans: Plan) -> list[str]:
    return [each.record.case.scheme for each in found(*plans).shortlist()]


def test_of_plans_that_train_alike_the_fastest_is_shown() -> None:
    assert shown(("checkpoint", 1.3, 10)) == ["exact"]
    assert shown(("checkpoint", 0.9, 10), ("msln", 0.8, 30)) == ["msln"]


def test_what_trains_further_away_must_be_faster_than_estimates_are_wrong() -> None:
    assert shown(("adam8bit", 0.99, 5, OTHER_UPDATES)) == ["exact"]
    assert shown(("adam8bit", 0.97, 5, OTHER_UPDATES)) == ["adam8bit", "exact"]


def test_plans_that_train_further_away_step_by_step_are_compared_with_those_that_are_shown() -> None:
    further = Training(updates="other", gradient="approximate")
    near, far = ("adam8bit", 0.985, 5, OTHER_UPDATES), ("adam8bit+actnn", 0.97, 5, further)

    assert shown(near, far) == ["adam8bit+actnn", "exact"]


@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_what_the_answer_names_is_in_a_table(trained: Literal["all", "adapters"]) -> None:
    near = Training(trained=trained, updates="other")
    further = Training(trained=trained, updates="other", precision="other")
    what = found(("adam8bit", 1.3, 90, near), ("adam8bit+checkpoint", 1.29, 90, further), exact=200)

    shown = [*what.shortlist(), *what.shortlist(adapters=True)]

    assert [each.record.case.scheme for each in shown] == ["adam8bit"]  # the other one is hardly faster
    (answer,) = fit_answer(what)
    assert answer.endswith(": adam8bit.")


def test_where_what_fits_is_too_slow_the_fastest_of_it_is_the_nearest() -> None:
    slow = found(("offload", 3, 60), ("checkpoint", 2.5, 90), ("gact:L2", 1.5, 101), exact=200)

    assert [each.record.case.scheme for each in slow.nearest()] == ["checkpoint", "offload"]
    assert slow.shortlist() == []


def test_a_plan_that_fits_into_a_simulated_budget_has_the_need_that_it_has_there() -> None:
    records = [record_of("exact", 100, 200), record_of("checkpoint", 95, 92), record_of("checkpoint", 88, 90)]

    (found,) = fitted(records)

    assert [each.need_bytes // GIB for each in found.tried if each.record.case.scheme == "checkpoint"] == [92]
