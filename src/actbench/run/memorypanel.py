"""A panel with the memory of a case that runs: over time, the largest holders, the step, and the verdict so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from actbench.model.advice import PHASES
from actbench.model.live import HOLDERS, LiveMemory
from actbench.report.plain import plain
from actbench.units import format_bytes

_CHART_LINES: Final = 5
_MOST_SAMPLES: Final = 4096  # in a run of hours the samples are merged two by two
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_WITHIN, _OVER = "cyan", "red"
_FRAME: Final = 4  # columns of the panel's borders


@dataclass
class SeenMemory:
    """The reports of a case so far.

    Attributes:
        last: The last report.
        samples: Bytes alive since the case started, in order, in stretches of equal time.
        said: What the case said last.
    """

    last: LiveMemory | None = None
    samples: list[int] = field(default_factory=list)
    said: str = ""
    _each: int = 1
    _left: list[int] = field(default_factory=list)

    def add(self, report: LiveMemory) -> None:
        """Note a report."""
        self.last = report
        for sample in report.samples:
            self._left.append(sample)
            if len(self._left) == self._each:
                self.samples.append(max(self._left))
                self._left.clear()
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = list(stretches(self.samples, len(self.samples) // 2))
            self._each *= 2


def memory_panel(
    title: str, seen: SeenMemory, width: int, *, elapsed: str = "", holders: int = HOLDERS, ascii_only: bool = False
) -> RenderableType:
    """Return the panel of a case; ``elapsed`` is the time since it began.

    Args:
        title: The case.
        seen: Its reports.
        width: Columns of the panel.
        elapsed: How long the case has run, in words.
        holders: Most holders that are shown.
        ascii_only: Whether to draw with ASCII characters.
    """
    last, parts = seen.last, [elapsed]
    if last is not None and last.step is not None:
        part = "ended" if last.phase is None else PHASES[last.phase]
        parts.insert(0, f"step {last.step}, {part}")
    elif last is not None and last.phase is not None:
        parts.insert(0, PHASES[last.phase])
    inside = max(10, width - _FRAME)
    lines: list[RenderableType] = []
    if last is None:
        lines.append(Text("no report of its memory yet", style="dim"))
    else:
        lines += [_figures(last), *_chart(seen.samples, last, inside, ascii_only=ascii_only)]
        if last.holders and holders:
            lines.append(_holders(last, holders))
    if seen.said:
        lines.append(Text(plain(seen.said), style="dim", overflow="ellipsis", no_wrap=True))
    heading = Text.assemble((plain(title), "bold"), *(f" · {part}" for part in parts if part))
    heading.truncate(max(10, inside - 2), overflow="ellipsis")
    return Panel(Group(*lines), title=heading, title_align="left", width=width)


def _figures(last: LiveMemory) -> Text:
    """Return the bytes now, the peak, the limit, and what follows of them so far."""
    found = Text.assemble((format_bytes(last.live_bytes), "bold"), " now   peak ", format_bytes(last.peak_bytes))
    if last.limit_bytes is None:
        return found
    over = last.peak_bytes - last.limit_bytes
    found.append(f" of {format_bytes(last.limit_bytes)}   ")
    if over > 0:
        return found.append(f"does not fit: at least {format_bytes(over)} are missing", "bold red")
    return found.append("fits so far", "green")


def _chart(samples: Sequence[int], last: LiveMemory, width: int, *, ascii_only: bool) -> Iterator[Text]:
    """Yield the lines of the memory over time; what is over the limit has another colour, and another letter."""
    columns = list(stretches(samples, width))
    top = max(last.peak_bytes, *columns, 1)
    limit = top if last.limit_bytes is None else last.limit_bytes
    eighths = len(_BLOCKS) - 1
    for row in reversed(range(_CHART_LINES)):
        line = Text(no_wrap=True)
        is_over = top * (row + 0.5) / _CHART_LINES > limit
        for amount in columns:
            filled = round(amount * _CHART_LINES * eighths / top) - row * eighths
            filled = max(0, min(filled, eighths))
            letter = _BLOCKS[filled]
            if ascii_only:
                letter = " " if filled < eighths / 2 else "!" if is_over else "#"
            line.append(letter, _OVER if is_over else _WITHIN)
        yield line


def _holders(last: LiveMemory, most: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(each, style="dim") for each in ("the largest holders now", "held", "share")))
    for name, amount in last.holders[:most]:
        share = f"{100 * amount / last.live_bytes:.0f} %" if last.live_bytes else ""
        table.add_row(Text(plain(name)), format_bytes(amount), share)
    return table


def stretches(samples: Sequence[int], count: int) -> Iterator[int]:
    """Yield the highest of each of so many stretches of samples, or the samples where there are no more."""
    if len(samples) <= count:
        yield from samples
        return
    for place in range(count):
        yield max(samples[place * len(samples) // count : (place + 1) * len(samples) // count])
