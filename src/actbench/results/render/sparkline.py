"""The memory over a step as a line of text."""

from __future__ import annotations

from actbench.results.advice import PHASES
from actbench.results.timeline import Timeline
from actbench.units import format_bytes

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
