from __future__ import annotations

import pytest

from actbench.report.tables.values import Rows, blocks

ROWS = Rows({"a": [1, 2, 3], "b": ["x", None, "z"]}, 3)


def test_rows_are_a_sequence_of_mappings() -> None:
    assert (len(ROWS), list(ROWS)) == (3, [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "z"}])
    assert (ROWS[0], ROWS[-1]) == ({"a": 1, "b": "x"}, {"a": 3, "b": "z"})
    assert ROWS[1:] == ({"a": 2, "b": None}, {"a": 3, "b": "z"})
    assert (len(ROWS[:2]), len(ROWS[5:])) == (2, 0)
    with pytest.raises(IndexError):
        ROWS[3]


def test_rows_are_equal_to_the_same_mappings_only() -> None:
    assert tuple(ROWS) == ROWS
    assert list(ROWS[:2]) != ROWS
    assert Rows({"a": [1]}, 1) != Rows({"a": [2]}, 1)
    assert Rows({}, 0) == ()


def test_rows_without_columns_are_empty() -> None:
    assert list(Rows({}, 2)) == [{}, {}]


@pytest.mark.parametrize("count", [0, 1, 256, 257, 600])
def test_blocks_hold_every_item_once(count: int) -> None:
    assert [item for block in blocks(range(count)) for item in block] == list(range(count))
