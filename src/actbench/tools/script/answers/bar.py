"""What the peak of a step is made of, as a bar with the limit of the card marked on it."""

from __future__ import annotations

from typing import Final, NamedTuple

from rich.text import Text

from actbench.model.advice import PHASES
from actbench.model.measured import Measurement
from actbench.report.advice import needed_bytes
from actbench.report.tables.step import PEAK_KINDS
from actbench.units import format_bytes

WIDEST: Final = 100
_LIMIT, _BETWEEN, _WORTH_NAMING = "|", "   ", 0.01

_STYLES: Final = {
    "weights_bytes": ("w", "blue"),
    "gradients_bytes": ("g", "cyan"),
    "optimizer_bytes": ("o", "magenta"),
    "activation_bytes": ("s", "yellow"),
    "cache_bytes": ("c", "green"),
    "engine_bytes": ("e", "bright_green"),
    "batch_bytes": ("b", "white"),
    "kept_bytes": ("k", "bright_red"),
    "communication_bytes": ("r", "bright_cyan"),
    "temporary_bytes": ("t", "bright_black"),
}
"""By field of the parts of a peak: its letter, for where there are no colours, and its colour."""

_GAPS: Final = ("_", "bright_white")


class _Part(NamedTuple):
    title: str
    letter: str
    style: str
    held_bytes: int


def peak_bar(measured: Measurement, width: int, *, coloured: bool) -> list[Text]:
    """Return the lines of the bar, or none where the parts of the peak are unknown.

    The bar is as long as what the step needs, or the limit if that is more: the gaps of the allocator are a part, too.

    Args:
        measured: The step.
        width: Characters of a line.
        coloured: Whether parts are blocks of their colours, and not letters.
    """
    parts = _parts(measured)
    limit, needed = measured.memory_limit_bytes, needed_bytes(measured)
    if not parts or not needed:
        return []
    cells = min(width, WIDEST) - len(_LIMIT)
    scale = cells / max(needed, limit or 0)
    bar, end, held = Text(), 0, 0
    for part in parts:
        held += part.held_bytes
        count, end = round(held * scale) - end, round(held * scale)
        bar.append(("█" if coloured else part.letter) * count, part.style)
    if limit is not None:
        mark = round(limit * scale)
        bar.append(" " * max(0, mark - end))
        bar = Text.assemble(bar[:mark], (_LIMIT, "bold red"), bar[mark:])
    where = f" in the {PHASES[measured.peak_phase]}" if measured.peak_phase else ""
    told = "" if limit is None else f"; {_LIMIT} is the limit of {format_bytes(limit)}"
    named = [part for part in parts if part.held_bytes >= _WORTH_NAMING * needed]
    legend = [Text()]
    for part in sorted(named, key=lambda part: -part.held_bytes):
        entry = Text.assemble(
            ("█" if coloured else part.letter, part.style), f" {part.title} {format_bytes(part.held_bytes)}"
        )
        if legend[-1] and len(legend[-1]) + len(entry) + len(_BETWEEN) > width:
            legend.append(Text())
        legend[-1] += Text(_BETWEEN if legend[-1] else "") + entry
    return [Text(f"The peak of a step, {format_bytes(measured.peak_bytes)}{where}{told}:"), bar, *legend]


def _parts(measured: Measurement) -> list[_Part]:
    if measured.peak_parts is None:
        return []
    found = measured.peak_parts.model_dump()
    parts = [_Part(title, *_STYLES[name], found[name]) for name, title in PEAK_KINDS.items() if found[name]]
    gaps = needed_bytes(measured) - measured.peak_bytes
    return [*parts, _Part("gaps of the allocator", *_GAPS, gaps)] if gaps > 0 and parts else parts
