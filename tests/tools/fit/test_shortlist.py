"""Which of the stacks that were tried are worth showing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from madeup import GIB, measured

from actbench.machine import now, provenance
from actbench.model.records import Case
from actbench.tools.fit.records import Asked, FitRecord, Fitted, Training, fitted
from actbench.tools.fit.tables import tables_of

LIMIT = 100 * GIB
OTHER_UPDATES = Training(updates="other")


Stack = tuple[str, float, int] | tuple[str, float, int, Training]


def found(*stacks: Stack, exact: int = 20) -> Fitted:
    """Return a fit of stacks, each with its seconds, the GiB of its activations, and how its training differs.

    A stack may begin with the name of its optimizer and a blank.
    """
    records = []
    for spec, seconds, activations, *training in (("exact", 1.0, exact), *stacks):
        optimizer, scheme = spec.split() if " " in spec else ("adamw", spec)
        case = Case(model="m", batch_size=1, scheme=scheme, optimizer=optimizer, meter="simulated")
        outcome = measured([0, 0, 0, activations * GIB], seconds, 0.0, LIMIT)
        record = FitRecord(
            recipe="m",
            case=case,
            outcome=outcome,
            asked=Asked(optimizer="adamw"),
            training=training[0] if training else Training(),
            recorded_at=now(),
            **provenance("actbench fit m"),
        )
        records.append(record)
    (only,) = fitted(records)
    return only


def shown(*stacks: Stack) -> set[str]:
    return {each.record.case.scheme for each in found(*stacks).shortlist()} - {"exact"}


@pytest.mark.parametrize(
    ("seconds", "activations", "with_more"),
    [(0.995, 10, False), (1.0, 10, False), (0.97, 10, True), (1.0, 9, True)],
    ids=["a little faster", "the same", "faster", "smaller"],
)
def test_a_part_more_must_save_time_or_memory(seconds: float, activations: int, with_more: bool) -> None:
    assert ("checkpoint+msln" in shown(("checkpoint", 1.0, 10), ("checkpoint+msln", seconds, activations))) == with_more


def test_the_exact_step_is_shown_where_it_fits() -> None:
    assert [each.record.case.scheme for each in found(("checkpoint", 1.3, 10)).shortlist()] == ["exact", "checkpoint"]


def test_the_exact_step_outdoes_a_scheme_that_saves_too_little() -> None:
    assert shown(("fewbit", 0.99, 20)) == set()
    assert shown(("fewbit", 0.97, 20)) == {"fewbit"}


def test_parts_that_save_little_each_are_shown_where_they_save_enough_together() -> None:
    little = ("checkpoint+msln", 0.985, 10)
    enough = ("checkpoint+msln+offload", 0.97, 10)

    assert shown(("checkpoint", 1.0, 10), little, enough) == {"checkpoint", "checkpoint+msln+offload"}


def test_stacks_that_train_further_away_step_by_step_are_compared_with_those_that_are_shown() -> None:
    adapters = Training(updates="other", gradient="approximate")
    near, far = ("adam8bit", 0.985, 5, OTHER_UPDATES), ("adam8bit+actnn", 0.97, 5, adapters)

    assert shown(("checkpoint", 1.0, 10), near, far) == {"checkpoint", "adam8bit+actnn"}


def test_another_part_is_not_one_more() -> None:
    assert shown(("checkpoint", 1.0, 10), ("msln+offload", 1.0, 10)) == {"checkpoint", "msln+offload"}


def test_what_trains_further_away_must_be_faster() -> None:
    assert shown(("checkpoint", 1.0, 10), ("adam8bit", 0.99, 5, OTHER_UPDATES)) == {"checkpoint"}
    assert shown(("checkpoint", 1.0, 10), ("adam8bit", 0.97, 5, OTHER_UPDATES)) == {"checkpoint", "adam8bit"}


def test_values_of_a_scheme_that_change_nothing_are_one_row() -> None:
    alike = ("checkpoint,every=2", 1.5, 10), ("checkpoint,every=4", 1.5, 10)

    assert shown(*alike, ("checkpoint,every=3", 1.5, 9)) == {"checkpoint,every=2", "checkpoint,every=3"}
    assert shown(*alike, ("offload", 1.5, 10)) == {"checkpoint,every=2", "offload"}


def test_where_nothing_fits_they_are_one_row_too() -> None:
    over = found(("checkpoint,every=2", 1.5, 150), ("checkpoint,every=4", 1.5, 150), ("offload", 1.5, 140), exact=200)

    assert [each.record.case.scheme for each in over.nearest()] == ["offload", "checkpoint,every=2", "exact"]
    assert over.shortlist() == []


def test_where_what_fits_is_too_slow_the_fastest_of_it_is_the_nearest() -> None:
    slow = found(("offload", 3, 60), ("checkpoint", 2.5, 90), ("gact:L2", 1.5, 101), exact=200)

    assert [each.record.case.scheme for each in slow.nearest()] == ["checkpoint", "offload"]


ADAPTERS = Training(trained="adapters")
OVER, SLOW, FIT = ("gact:L2", 1.2, 150), ("offload", 2.5, 50), ("checkpoint", 1.3, 90)
ADAPTED, ADAPTED_OVER = ("lora:16+checkpoint", 1.1, 60, ADAPTERS), ("lora:16", 0.9, 120, ADAPTERS)


@pytest.mark.parametrize(
    ("stacks", "titles"),
    [
        ((OVER, SLOW, FIT), ["What fits", "Frontier of time and memory"]),
        (
            (OVER, SLOW, ADAPTED, ADAPTED_OVER),
            [
                "Nothing takes at most 2 times the exact step's time; what fits",
                "With adapters",
                "Frontier of time and memory",
            ],
        ),
        (
            (OVER, ADAPTED_OVER),
            ["Nothing fits; what needs least", "With adapters, nothing fits; what needs least"],
        ),
    ],
    ids=["some fit", "adapters fit", "nothing fits"],
)
def test_no_title_promises_what_its_rows_do_not_hold(stacks: Sequence[Stack], titles: Sequence[str]) -> None:
    what = found(*stacks, exact=200)

    tables = tables_of(what, "What fits")

    assert [table.title.partition(": ")[0] for table in tables] == titles
    by_scheme = {each.record.case.scheme: each for each in what.tried}
    for table in tables:
        rows = [by_scheme[str(row["scheme"])] for row in table.rows if row["scheme"] != "exact"]
        within = [each.measured.fits and each.slowdown <= what.max_slowdown for each in rows]
        promises = "othing" not in table.title
        assert within == [promises] * len(rows)
        assert promises or not any(row.get("on_frontier") for row in table.rows)


def test_the_exact_step_that_does_not_fit_is_said_to_be_there_to_compare_with() -> None:
    assert "does not fit" in tables_of(found(FIT, exact=200), "What fits")[0].notes[1]
    assert "does not fit" not in tables_of(found(FIT), "What fits")[0].notes[1]


def listed(*stacks: Stack) -> list[tuple[str | None, str]]:
    return [(each.record.case.optimizer, each.record.case.scheme) for each in found(*stacks).shortlist()]


def test_the_exact_step_is_shown_where_it_fits_and_first_if_nothing_is_faster() -> None:
    assert listed() == [("adamw", "exact")]
    assert listed(("checkpoint", 1.3, 10)) == [("adamw", "exact"), ("adamw", "checkpoint")]
    assert listed(("adam8bit", 0.9, 10, OTHER_UPDATES))[-1] == ("adamw", "exact")


def test_a_faster_optimizer_of_the_same_updates_is_shown_beside_the_exact_step() -> None:
    rows = listed(("adamw-fused exact", 0.9, 20), ("checkpoint", 1.3, 10))

    assert rows == [("adamw-fused", "exact"), ("adamw", "exact"), ("adamw", "checkpoint")]
