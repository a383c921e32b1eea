from __future__ import annotations

from actbench.model.ledger import Ledger, SavedTensor
from actbench.model.records import Case
from actbench.report.ledgertables import LedgerLine, ledger_table, lines_table, total_tables

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
    _, operators, _ = total_tables(LEDGER)
    rows = operators.rows

    assert [(row["operator"], row["tensors"], row["kept_bytes"], row["share"]) for row in rows] == [
        ("GeluBackward0", 2, 96 + 32, 1.0),
        ("AddmmBackward0", 1, 0, 0.0),
        ("total of 2", 3, 96 + 32, 1.0),
    ]


def test_blocks_of_a_network_are_one_module_and_small_ones_one_row():
    paths = {"layer.0.out": 8, "layer.1.out": 16, "head": 20, "stem.0": 1, "stem.1": 2}
    saved = [KEPT.model_copy(update={"module": path, "kept_bytes": size}) for path, size in paths.items()]
    modules, _, _ = total_tables(Ledger(entries=tuple(saved)), top=2)

    assert [(row["module"], row["tensors"], row["kept_bytes"]) for row in modules.rows] == [
        ("layer.*.out", 2, 24),
        ("head", 1, 20),
        ("2 more", 2, 3),
        ("total of 4", 5, 47),
    ]


def test_reasons_are_summed():
    packed = KEPT.model_copy(update={"packed": True})
    *_, reasons = total_tables(Ledger(entries=(KEPT, AGAIN, NUMBER, packed, NUMBER)))

    assert [(row["reason"], row["tensors"], row["kept_bytes"]) for row in reasons.rows] == [
        ("saved as it is", 1, 96),
        ("packed by the scheme", 1, 96),
        ("the loss", 2, 64),
        ("in a storage that is counted already", 1, 0),
        ("total of 4", 5, 256),
    ]


def test_rows_of_no_bytes_and_small_ones_are_left_out_where_it_is_asked_for():
    table = ledger_table(LEDGER, top=1, everything=False)

    assert [row["kept_bytes"] for row in table.rows] == [96]
    assert "Not shown: 1 smaller row of 32 B together; --top 2 shows all." in table.notes
    assert "Not shown: 1 row of 0 B; --all shows every row, in the order of the run." in table.notes
    assert [row["kept_bytes"] for row in ledger_table(LEDGER, everything=False).rows] == [96, 32]


def test_several_cases_stand_in_one_table():
    lines = [LedgerLine(Case(model="m", batch_size=batch), KEPT) for batch in (1, 2)]

    assert [(row["batch_size"], row["kept_bytes"]) for row in lines_table(lines).rows] == [(1, 96), (2, 96)]
