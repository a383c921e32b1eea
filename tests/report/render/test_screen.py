from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from actbench.model.measured import MeasuredRecord
from actbench.report import tables
from actbench.report.render import formats, screen
from actbench.report.render.screen import in_lines
from actbench.report.render.widths import fitted
from actbench.report.tables import Table
from actbench.report.tables.values import Column

MakeRecord = Callable[..., MeasuredRecord]


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
    assert "Hidden for lack of space: " in text
    assert "Step" in text[text.index("Hidden for lack of space") :]
    assert "fewbit:3+randomized:0.2" in text
    assert "0.48x" in text, "speed is not a detail"


def test_columns_leave_in_order_of_their_detail(table: Table) -> None:
    widths = range(40, 200, 5)
    shown = [[column.detail for column in fitted(table, width).text.columns] for width in widths]
    columns = [column for column in table.columns if not column.quiet and not column.spread_of]
    dropped = [[c.detail for c in columns if c not in fitted(table, width).text.columns] for width in widths]

    for kept, gone in zip(shown, dropped, strict=True):
        assert min((d for d in gone if d), default=9) >= max(kept)
    assert all(0 in kept for kept in shown)
    assert not any(dropped[-1])


def test_a_row_in_a_pipe_is_one_line_in_the_width_that_it_has(table: Table) -> None:
    wide, narrow = (printed(table, width, terminal=False) for width in (200, 80))

    assert any("fewbit:3+randomized:0.2" in line and "0.48x" in line and "1.05 s" in line for line in wide)
    assert "Hidden" not in "\n".join(wide)
    assert any("fewbit:3+randomized:0.2" in line and "0.48x" in line for line in narrow)
    assert max(map(len, narrow)) <= 80
    assert "Hidden for lack of space: " in "\n".join(narrow)


def test_notes_stand_below(table: Table) -> None:
    text = " ".join(" ".join(printed(table, 200)).split())

    assert text.endswith(" ".join(table.notes))


def many(rows: int, notes: int = 0) -> Table:
    columns = [Column(key, key.capitalize(), "text", lambda place: f"{place}.") for key in ("first", "second")]
    return tables.fill("Many", columns, range(rows), [f"note {place}" for place in range(notes)])


def test_a_terminal_shows_the_first_rows_and_says_where_the_others_are() -> None:
    lines = printed(many(screen.LIMIT + 1234, notes=screen.LIMIT + 1), 200)
    how = "A pipe (… | less -S) gets all, and so do exports that hold this table (--export-csv FILE)."

    assert [line.split()[0] for line in lines[4 : 4 + screen.LIMIT]] == [f"{place}." for place in range(screen.LIMIT)]
    assert lines[-2:] == [
        f"note {screen.LIMIT - 1}",
        f"Left out here: 1,234 more rows and 1 more note. {how}",
    ]
    assert "more" not in "".join(printed(many(screen.LIMIT), 200))


def test_a_pipe_gets_every_row() -> None:
    count = 3 * screen.LIMIT
    lines = printed(many(count, notes=count), 80, terminal=False)

    assert [line.split()[0] for line in lines[4 : 4 + count]] == [f"{place}." for place in range(count)]
    assert lines[-count:] == [f"note {place}" for place in range(count)]


LETTERS = st.text("az 09.–±µ|漢é{}%", max_size=12).map(str.strip)


@given(
    st.lists(st.tuples(LETTERS, LETTERS), min_size=1, max_size=5),
    st.text("az ↑", min_size=1, max_size=20).filter(str.strip),
)
def test_a_pipe_gets_the_layout_of_a_wide_terminal(rows: list[tuple[str, str]], heading: str) -> None:
    columns = [
        Column("scheme", "Scheme", "text", lambda row: row[0]),
        Column("peak", heading, "bytes", lambda row: row[1], better="lower"),
        Column("status", "Status", "text", lambda row: row[0][:2]),
    ]
    table = tables.fill("A title", columns, rows, ["a note"])

    title, *lines = printed(table, 500)

    assert printed(table, 80, terminal=False) == [title.rstrip(), *lines]


@pytest.mark.parametrize("terminal", [True, False])
def test_cells_are_written_a_few_times_whatever_the_number_of_rows_and_columns(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = 0

    def write(value: object, unit: object) -> str:
        nonlocal written
        written += 1
        return str(value)

    monkeypatch.setattr(formats, "write", write)
    columns = [Column(f"c{place}", "Column", "text", lambda row: row, detail=place) for place in range(20)]
    rows = 2 * screen.LIMIT
    printed(tables.fill("Many", columns, range(rows)), 40, terminal)

    assert written <= (2 * screen.LIMIT if terminal else rows) * len(columns)


def test_a_row_of_a_pipe_is_one_line() -> None:
    column = Column("label", "Label", "text", lambda text: text)
    lines = printed(tables.fill("Labels", [column], ["two\nlines\tand a tab", "one"]), 80, terminal=False)

    assert [line.strip() for line in lines[4:6]] == ["two lines and a tab", "one"]


def test_notes_take_so_many_lines_and_details_what_the_others_leave() -> None:
    notes = ["first detail", "what failed", "a long one " * 20, "second detail", "what does not fit"]
    details = frozenset([notes[0], notes[3]])

    assert in_lines(notes, 80, None, details) == notes
    assert in_lines(notes, 80, 9, details) == notes
    assert in_lines(notes, 80, 4, details) == [
        *("first detail", "what failed", "what does not fit", "2 more notes: add --verbose; exports have all."),
    ]
    assert in_lines(notes[2:3], 80, 2) == [notes[2]], "one is always shown"
