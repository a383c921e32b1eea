"""What a terminal shows: a table, with a line about what does not fit, or the memory over a step as a line of text.

A pipe gets plain lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from actbench.model.advice import PHASES
from actbench.model.timeline import Timeline
from actbench.report.render.formats import Cells, framed, readable
from actbench.report.render.widths import cells_in, fitted, widths, wrapped
from actbench.report.tables import Table
from actbench.units import counted, format_bytes

LIMIT = 500
"""Most rows, and most notes, on a terminal."""

NOTE_LINES = 5
"""Lines that notes take below a table, unless all are asked for."""

_BOX = box.SIMPLE_HEAD


@dataclass(frozen=True)
class Screen:
    """The first rows of a table as a rich renderable, in as many columns as fit.

    ``note_lines`` is the most lines that its notes take; None for all notes.
    """

    table: Table
    note_lines: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = readable(self.table)
        shown = fitted(replace(table, frame=table.frame.head(LIMIT)), options.max_width)
        yield from (Text(line, style="bold") for line in table.lead)
        yield from console.render(_grid(table.title, shown.text), options)
        notes = in_lines(table.notes[:LIMIT], options.max_width, self.note_lines, table.details)
        for line in [*shown.notes, *notes]:
            yield Text(line, style="dim")
        if len(table.frame) > LIMIT or len(table.notes) > LIMIT:
            yield Text(_left_out(len(table.frame), len(table.notes)), style="dim")


def show(table: Table, console: Console, note_lines: int | None = None) -> None:
    """Print a table with its notes at the width of the console; a pipe gets every row.

    ``note_lines`` is as of :class:`Screen`.
    """
    if console.is_terminal:
        console.print(Screen(table, note_lines), crop=False)
        return
    console.file.writelines(f"{line}\n" for line in _lines(readable(table), console.options, note_lines))


def in_lines(
    notes: Sequence[str], width: int, most: int | None, details: Collection[str] = frozenset()
) -> Sequence[str]:
    """Return the notes that fit into so many lines of a width, in their order, and how many others there are.

    ``details`` have what room the other notes leave. ``most`` None is for all notes.
    """
    if most is None or len(list(_paragraphs(notes, width))) <= most:
        return notes
    left, shown = most - 1, set[int]()
    for place in sorted(range(len(notes)), key=lambda place: notes[place] in details):
        lines = len(list(_paragraphs([notes[place]], width)))
        if lines <= left or not shown:
            shown.add(place)
            left -= lines
    hidden = len(notes) - len(shown)
    told = [f"{counted(hidden, 'more note')}: add --verbose; exports have all."] if hidden else []
    return [*(notes[place] for place in sorted(shown)), *told]


def _left_out(rows: int, notes: int) -> str:
    """Return how many rows and notes are not shown, and where to find them."""
    counts = ((rows - LIMIT, "row"), (notes - LIMIT, "note"))
    found = [counted(more, f"more {what}") for more, what in counts if more > 0]
    return (
        f"Left out here: {' and '.join(found)}. A pipe (… | less -S) gets all, and so do exports that hold this table "
        "(--export-csv FILE)."
    )


def _grid(title: str, text: Cells) -> Grid:
    grid = Grid(title=Text(title, style="bold"), title_justify="left", box=_BOX, pad_edge=False)
    grid.padding = (0, 1, 0, 0)
    for heading, numeric, width in zip(text.headings, text.numeric, widths(text).values(), strict=True):
        grid.add_column(
            Text("\n".join(wrapped(heading, width))),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in text.rows:
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _lines(table: Table, options: ConsoleOptions, note_lines: int | None) -> Iterator[str]:
    """Yield the lines of a whole readable table; the layout is rich's, at a hundredth of the time."""
    told: list[str] = []
    yield from _paragraphs(table.lead, options.max_width)
    if table.columns:
        if table.title:
            yield from _paragraphs([table.title], options.max_width)
        shown = fitted(table, options.max_width)
        text, notes = shown.text, shown.notes
        one_line = {
            key: [each if each.isprintable() else " ".join(each.split()) for each in texts]
            for key, texts in text.texts.items()
        }
        yield from _grid_lines(Cells(text.columns, framed(one_line, text.frame)), _BOX.substitute(options))
    else:
        yield ""
    notes = in_lines(table.notes, options.max_width, note_lines, table.details)
    yield from _paragraphs([*told, *notes], options.max_width)


def _paragraphs(texts: Sequence[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _grid_lines(text: Cells, lines: box.Box) -> Iterator[str]:
    sizes = list(widths(text).values())
    padded = [width + 1 for width in sizes[:-1]] + sizes[-1:]
    parts_of = [wrapped(title, width) for title, width in zip(text.headings, sizes, strict=True)]
    height = max(map(len, parts_of))
    headings = [[""] * (height - len(parts)) + parts for parts in parts_of]  # headings align at the bottom
    yield lines.get_top(padded)
    for row in _aligned(headings, text.numeric, sizes):
        yield lines.head_left + f" {lines.head_vertical}".join(row) + lines.head_right
    yield lines.get_row(padded, "head")
    for row in _aligned(text.texts.values(), text.numeric, sizes):
        yield lines.mid_left + f" {lines.mid_vertical}".join(row) + lines.mid_right
    yield lines.get_bottom(padded)


def _aligned(
    columns: Iterable[Sequence[str]], numeric: Sequence[bool], sizes: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    """Return rows with every cell as wide as its column."""
    filled = []
    for texts, is_number, width in zip(columns, numeric, sizes, strict=True):
        gaps = (" " * (width - cells_in(text)) for text in texts)
        filled.append([gap + text if is_number else text + gap for text, gap in zip(texts, gaps, strict=True)])
    return zip(*filled, strict=True)


_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = ".:-=+*%@"
NARROWEST, WIDEST = 20, 100
_NAMED_SPANS = 5
"""With more parts than this, as with many micro-batches, only their first letters are written."""


def sparkline(timeline: Timeline, width: int, *, ascii_only: bool = False) -> list[str]:
    """Return lines: the parts of the step, its bytes, and where the peak is.

    Args:
        timeline: The timeline to draw, in blocks from the least bytes to the most.
        width: Most characters of a line.
        ascii_only: Draw with punctuation.
    """
    width = max(NARROWEST, min(width, WIDEST, timeline.events + 1))
    levels = _LETTERS if ascii_only else _BLOCKS
    totals = _columns(timeline, width)
    least, most = min(totals), max(totals)
    steps = len(levels) - 1
    drawn = "".join(levels[(total - least) * steps // (most - least) if most > least else steps] for total in totals)
    peak = _column(timeline, timeline.peak_event, width)
    told = f"peak {format_bytes(timeline.peak_bytes)} in the {PHASES[timeline.peak_phase]}"
    pointer = f"{' ' * peak}^ {told}" if peak + len(told) + 2 <= width else f"{told} ^".rjust(peak + 1)
    scale = f"{levels[0]} {format_bytes(least)}   {levels[-1]} {format_bytes(most)}"
    return [_parts(timeline, width), drawn, pointer, scale]


def _column(timeline: Timeline, event: int, width: int) -> int:
    return min(event * width // (timeline.events + 1), width - 1)


def _columns(timeline: Timeline, width: int) -> list[int]:
    """Return the highest total in each column; a column without a point repeats the one before."""
    found: dict[int, int] = {}
    for moment, total in zip(timeline.moments, timeline.totals, strict=True):
        column = _column(timeline, moment, width)
        found[column] = max(found.get(column, 0), total)
    totals: list[int] = []
    for column in range(width):
        totals.append(found.get(column, totals[-1] if totals else timeline.totals[0]))
    return totals


def _parts(timeline: Timeline, width: int) -> str:
    """Return a line with a bar, and if there is room a name, at the beginning of each part of the step."""
    starts = [_column(timeline, span.start, width) for span in timeline.spans]
    line = [" "] * width
    for place, (span, start) in enumerate(zip(timeline.spans, starts, strict=True)):
        room = (starts[place + 1] if place + 1 < len(starts) else width) - start
        name = span.phase if len(timeline.spans) <= _NAMED_SPANS else span.phase[0]
        text = f"|{name if len(name) < room else name[: max(room - 1, 0)]}"
        line[start : start + len(text)] = text
    return "".join(line[:width]).rstrip()
