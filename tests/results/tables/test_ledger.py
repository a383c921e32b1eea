from __future__ import annotations

from actbench.results.ledger import Ledger, LedgerLine, SavedTensor, ledger_table, lines_table, operators_table
from actbench.results.records import Case

KEPT = SavedTensor(
    module="a",
    operator="GeluBackward0",
    argument="self",
    shape=(2, 4),
    dtype="float32",
    bits=32,
    kept_bytes=96,
    shared_with=("b AddmmBackward0 mat1", "c AddmmBackward0 mat1"),
)
AGAIN = KEPT.model_copy(update={"module": "b", "operator": "AddmmBackward0", "kept_bytes": 0})
NUMBER = KEPT.model_copy(update={"module": "", "shape": (), "kept_bytes": 32, "shared_with": (), "reason": "the loss"})
LEDGER = Ledger(entries=(KEPT, AGAIN, NUMBER), recomputed=7)


def test_rows_keep_the_order_of_the_run():
    table = ledger_table(LEDGER, "Title")

    assert [row["module"] for row in table.rows] == ["a", "b", "(the model)"]
    assert [row["shape"] for row in table.rows] == ["2x4", "2x4", "scalar"]
    assert [row["shared_with"] for row in table.rows] == ["b AddmmBackward0 mat1 and 1 more"] * 2 + [None]
    assert table.title == "Title"


def test_the_summary_tells_bytes_shared_and_recomputed_tensors():
    shared, recomputed = ledger_table(LEDGER).notes

    assert shared.startswith("Kept for backward: 128 B in 2 of 3 saved tensors; 1 shares the storage")
    assert recomputed.startswith("7 more")
    assert len(ledger_table(LEDGER.model_copy(update={"recomputed": 0})).notes) == 1


def test_operators_are_summed_the_largest_first():
    rows = operators_table(LEDGER).rows

    assert [(row["operator"], row["tensors"], row["kept_bytes"], row["share"]) for row in rows] == [
        ("GeluBackward0", 2, 96 + 32, 1.0),
        ("AddmmBackward0", 1, 0, 0.0),
        ("total of 2", 3, 96 + 32, 1.0),
    ]


def test_several_cases_stand_in_one_table():
    lines = [LedgerLine(Case(model="m", batch_size=batch), KEPT) for batch in (1, 2)]

    assert [(row["batch_size"], row["kept_bytes"]) for row in lines_table(lines).rows] == [(1, 96), (2, 96)]
