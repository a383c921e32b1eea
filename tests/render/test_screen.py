from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from actbench import tables
from actbench.records import Record
from actbench.render import screen
from actbench.tables import Table

MakeRecord = Callable[..., Record]


@pytest.fixture
def table(make_record: MakeRecord) -> Table:
    return tables.results_table(
        [
            make_record(meter="cpu", step_seconds=(0.4, 0.5, 0.6), model="roberta-base"),
            make_record("fewbit:3+randomized:0.2", meter="cpu", step_seconds=(1.0, 1.1), model="roberta-base"),
        ],
        "What [bold]is[/bold] saved?",
    )


def printed(table: Table, width: int, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    screen.show(table, Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue().splitlines()


def test_a_wide_terminal_shows_every_column(table: Table) -> None:
    text = "\n".join(printed(table, 200))

    assert "16 ± 1.6" in text
    assert "Left out here" not in text
    assert "What [bold]is[/bold] saved?" in text, "what a user wrote is no markup"


def test_a_narrow_terminal_leaves_columns_out_and_says_so(table: Table) -> None:
    lines = printed(table, 100)
    text = "\n".join(lines)

    assert max(map(len, lines)) <= 100
    assert "Left out here, for want of width: " in text
    assert "Step" in text[text.index("Left out here") :]
    assert "fewbit:3+randomized:0.2" in text
    assert "0.48x" in text, "speed is not a detail"


def test_columns_leave_in_order_of_their_detail(table: Table) -> None:
    widths = range(40, 200, 5)
    shown = [[column.detail for column in screen.fitted(table, width).columns] for width in widths]
    dropped = [[c.detail for c in table.columns if c not in screen.fitted(table, width).columns] for width in widths]

    for kept, gone in zip(shown, dropped, strict=True):
        assert min((d for d in gone if d), default=9) >= max(kept)
    assert all(0 in kept for kept in shown)


def test_what_is_no_terminal_gets_every_column_on_one_line(table: Table) -> None:
    lines = printed(table, 80, terminal=False)

    assert any("fewbit:3+randomized:0.2" in line and "0.48x" in line and "1.05 s" in line for line in lines)
    assert "Left out" not in "\n".join(lines)


def test_notes_stand_below(table: Table) -> None:
    text = " ".join(" ".join(printed(table, 200)).split())

    assert text.endswith(" ".join(table.notes))
