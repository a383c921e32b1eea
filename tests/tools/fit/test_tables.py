"""The tables of a fit: titles, answers in a few sentences, frontiers, notes, and what is printed to run a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from madeup import LIMIT, OTHER_UPDATES, Plan, found, record_of

from actbench.report import render, store
from actbench.tools.fit.answer import fitted
from actbench.tools.fit.codegen import pieces_of
from actbench.tools.fit.records import FitRecord, Training
from actbench.tools.fit.tables import fit_tables, tables_of

UNBIASED = Training(gradient="unbiased")
ADAPTERS = Training(trained="adapters")

OVER, SLOW, FIT = ("gact:L2", 1.2, 150), ("offload", 2.5, 50), ("checkpoint", 1.3, 90)
ADAPTED, ADAPTED_OVER = ("lora:16+checkpoint", 1.1, 60, ADAPTERS), ("lora:16", 0.9, 120, ADAPTERS)


@pytest.mark.parametrize(
    ("plans", "title"),
    [
        ((OVER, SLOW, FIT), "What fits"),
        ((OVER, SLOW, ADAPTED, ADAPTED_OVER), "What fits"),
        ((OVER, SLOW), "Fits only at more than twice the exact step's time"),
        ((OVER, ADAPTED_OVER), "No simulated plan fits; what needs least"),
    ],
    ids=["some fit", "adapters fit", "slow ones fit", "nothing fits"],
)
def test_no_title_promises_what_its_plans_do_not_hold(plans: Sequence[Plan], title: str) -> None:
    what = found(*plans, exact=200)

    table, *_ = tables_of(what, "What fits")

    assert table.title.partition(": ")[0] == title
    by_scheme = {each.record.case.scheme: each for each in what.tried}
    rows = [by_scheme[str(row["scheme"])] for row in table.rows if row["number"] is not None]
    assert rows
    promises = title == "What fits"
    assert [what.has_room_for(each) and each.slowdown <= what.max_slowdown for each in rows] == [promises] * len(rows)


def test_the_first_rows_are_those_that_everybody_knows() -> None:
    usual = (("checkpoint", 1.3, 120), ("lora:16+checkpoint", 1.1, 60, ADAPTERS))

    table, *_ = tables_of(found(*usual, ("gact:L2,only=model.layers.[0-3]", 1.2, 95, UNBIASED), exact=200), "What fits")

    rows = [(row["scheme"], row["fits"]) for row in table.rows]
    assert rows[:3] == [("exact", False), ("lora:16+checkpoint", True), ("checkpoint", False)]
    assert rows[3:] == [("gact:L2,only=model.layers.[0-3]", True)]


@pytest.mark.parametrize(
    ("plans", "exact", "lead"),
    [
        ((), 20, ["It fits unchanged: 20.00 GiB of 100.00 GiB."]),
        (
            (("checkpoint,only=model.layers.[0-10]", 1.3, 90), ("gact:L2", 1.2, 95, UNBIASED)),
            200,
            [
                (
                    "Plan 1 needs 90.00 GiB of 100.00 GiB and 30 % more time (estimated), and has exact gradients: "
                    "checkpoint on blocks 0-10."
                ),
                (
                    "Plan 2 needs 95.00 GiB of 100.00 GiB and 20 % more time (estimated), and has unbiased gradients: "
                    "gact:L2."
                ),
            ],
        ),
        (
            (("adamw-fused adam8bit", 1.5, 90, OTHER_UPDATES), ADAPTED),
            200,
            [
                (
                    "Plan 1 needs 90.00 GiB of 100.00 GiB and 50 % more time (estimated), and has exact gradients and "
                    "other updates: adam8bit, adamw-fused."
                ),
                (
                    "Plan 2 needs 60.00 GiB of 100.00 GiB and 10 % more time (estimated), and trains adapters with "
                    "exact gradients: lora:16, checkpoint."
                ),
            ],
        ),
        (
            (ADAPTED, ("lora:16+gact:L2", 1.09, 60, ADAPTERS.model_copy(update={"gradient": "unbiased"}))),
            200,
            ["Plan 1 needs 60.00 GiB of 100.00 GiB and 10 % more time "],
        ),
        (
            (SLOW,),
            200,
            [
                "Nothing fits within twice the exact step's time.",
                "Plan 1 needs 50.00 GiB of 100.00 GiB and 2.5 times ",
            ],
        ),
        (
            (OVER, ("lora:16", 3.0, 60, ADAPTERS)),
            200,
            [
                "Nothing fits within twice the exact step's time.",
                "Plan 1 needs 60.00 GiB of 100.00 GiB and 3 times ",
            ],
        ),
        ((OVER,), 200, ["No plan that was simulated fits in 100.00 GiB; gact:L2 needs least of them, 150.00 GiB."]),
    ],
    ids=[
        "exact",
        "exact gradients and any",
        "updates and adapters",
        "adapters",
        "too slow",
        "adapters too slow",
        "nothing",
    ],
)
def test_the_answer_in_a_few_sentences(plans: Sequence[Plan], exact: int, lead: Sequence[str]) -> None:
    told = tables_of(found(*plans, exact=exact), "What fits")[0].lead

    assert len(told) == len(lead) <= 3
    assert all(text.startswith(begin) for text, begin in zip(told, lead, strict=True))


def test_frontiers_fall_and_say_what_fits() -> None:
    plans = (("msln", 1.0, 150), ("checkpoint", 1.3, 90), ("offload", 1.4, 95), ("gact:L2", 1.1, 80, UNBIASED))
    exact, other = (table for table in tables_of(found(*plans, exact=200), "t") if "Frontier" in table.title)

    assert [(row["scheme"], row["fits"]) for row in exact.rows] == [("msln", False), ("checkpoint", True)]
    assert [row["scheme"] for row in other.rows] == ["msln", "gact:L2"]
    assert exact.curve is not None
    assert exact.curve.limit_bytes == LIMIT


def test_uniform_plans_are_compared_with() -> None:
    plans = (("checkpoint,only=model.layers.[0-10]", 1.2, 90), ("offload,only=model.layers.[0-31]", 1.5, 90))
    what = found(*plans, exact=200)

    (note,) = (note for note in tables_of(what, "t")[0].notes if "The same for all blocks" in note)
    assert note == ("The same for all blocks, exact gradients: 90.00 GiB, 1.50x the time: offload all blocks.")


def test_what_is_printed_has_the_limit_that_was_asked_for() -> None:
    (found,) = fitted([record_of("exact", 100, 200), record_of("checkpoint", 88, 90)])

    command = pieces_of([("Plan 1", plan) for plan in found.shortlist()], 3)[-1][1]

    assert "-s checkpoint" in command
    assert f"--memory-limit {LIMIT}B" in command


def test_what_was_measured_stands_beside_its_simulation_within_another_limit() -> None:
    on_device = record_of("checkpoint", 100, 91, "cpu")
    (found,) = fitted([record_of("exact", 100, 200), record_of("checkpoint", 88, 90), on_device])

    (pairs,) = (table for table in tables_of(found, "t") if table.title.startswith("Measured"))

    assert [(row["scheme"], row["meter"]) for row in pairs.rows] == [("checkpoint", "simulated"), ("checkpoint", "cpu")]


def test_specifications_of_plans_stand_below_the_table() -> None:
    spec = "checkpoint,only=model.layers.[0-10]"

    table = tables_of(found((spec, 1.2, 90), exact=200), "t")[0]

    assert [row["number"] for row in table.rows] == [None, 1]
    assert table.notes[0] == f"Plan 1 as options: -s '{spec}' --optimizer adamw"


def test_a_step_that_only_told_of_the_blocks_comes_after_plans() -> None:
    alone = record_of("exact", 100, 200)
    shared = [record_of(scheme, 100, need) for scheme, need in (("fsdp:8", 150), ("checkpoint+fsdp:8", 90))]
    asked = shared[0].asked.model_copy(update={"scheme": "fsdp:8"})
    records = [alone, *(each.model_copy(update={"asked": asked}) for each in shared)]

    tables = [table for table in fit_tables(records) if not table.title.startswith("Usual")]
    assert [table.rows[0]["scheme"] for table in tables] == ["checkpoint+fsdp:8", "exact"]
    assert fit_tables([alone])[0].title.startswith("No simulated plan fits")


OLD = Path(__file__).parents[2] / "data" / "fit-2026-11.fit.jsonl"


def test_records_of_stacks_that_were_searched_for_can_be_read() -> None:
    tables = fit_tables(store.read_results(OLD, FitRecord).records)

    assert tables[0].lead[0].startswith("Plan 1 needs ")
    assert "checkpoint,every=2" in tables[0].lead[0]
    assert [row["scheme"] for row in tables[0].rows]
    assert "Frontier" in tables[-1].title
    assert all(map(render.markdown, tables))
