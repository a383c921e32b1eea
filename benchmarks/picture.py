"""Draw the README's picture from the committed records of the quickstart: the peak of a step, by kind, and the limit.

``make pages`` writes it::

    .venv/bin/python benchmarks/picture.py > docs/images/memory.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from actbench.model.measured import MeasuredRecord
from actbench.model.records import Record
from actbench.report import kinds, store

ROOT = Path(__file__).parents[1]
MODEL = "roberta-base"
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 800, 186, 160, 92, 32, 20
SMALLEST = 0.5
"""Pixels of a part that is still drawn."""
KINDS = {
    "weights_bytes": ("weights", "#4c78a8"),
    "gradients_bytes": ("gradients", "#72b7b2"),
    "optimizer_bytes": ("optimizer state", "#9d7ac2"),
    "activation_bytes": ("saved for backward", "#f0a848"),
    "temporary_bytes": ("temporaries", "#98a2ad"),
}
STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328;
  paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
.page { fill: #ffffff; } .title { font-size: 15px; font-weight: 600; } .quiet { fill: #59636e; }
.limit { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 5 4; } .over { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; stroke: #0d1117; } .page { fill: #0d1117; }
  .quiet { fill: #9198a1; } .limit { stroke: #ff7b72; } .over { fill: #ff7b72; }
}"""


def drawn(records: list[Record]) -> str:
    """Return the picture of the rows of a model on one card."""
    found = sorted(records, key=lambda record: -record.outcome.peak_bytes)
    [limit] = {record.outcome.memory_limit_bytes for record in found}
    scale = (WIDTH - LEFT - RIGHT) / max(record.outcome.peak_bytes for record in found)
    height = TOP + ROW * len(found) + 14
    case = found[0].case
    title = f"{case.model}, batch {case.batch_size}, {case.sequence_length} tokens, on {case.device_profile}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>Peak memory of a training step: {escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="title" x="16" y="26">Peak memory of a training step: {escape(title)}</text>',
        *_legend(),
    ]
    [exact] = [record.outcome.estimated.step_seconds for record in found if record.case.scheme == "exact"]
    x = LEFT + limit * scale
    tops = range(TOP, TOP + ROW * len(found), ROW)
    lines += [line for record, y in zip(found, tops, strict=True) for line in _bar(record, y, scale)]
    lines += [
        f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 12}" y2="{height - 10}"/>',
        f'<text class="over" x="{x + 6:.1f}" y="{TOP - 6}">limit {_gib(limit)}</text>',
    ]
    lines += [line for record, y in zip(found, tops, strict=True) for line in _labels(record, y, scale, exact)]
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    x = 16
    for name, colour in KINDS.values():
        yield f'<rect x="{x}" y="42" width="11" height="11" rx="2" fill="{colour}"/>'
        yield f'<text class="quiet" x="{x + 16}" y="52">{name}</text>'
        x += 34 + 7 * len(name)


def _bar(record: Record, y: int, scale: float) -> Iterator[str]:
    x = float(LEFT)
    for kind, (_, colour) in KINDS.items():
        width = getattr(record.outcome.peak_parts, kind) * scale
        if width >= SMALLEST:
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
        x += width


def _labels(record: Record, y: int, scale: float, exact: float) -> Iterator[str]:
    found = record.outcome
    x = LEFT + found.peak_bytes * scale + 8
    over = "" if found.over_limit_bytes is None else ' class="over"'
    speed = f'<tspan class="quiet" dx="8">{exact / found.estimated.step_seconds:.2f}x speed</tspan>'
    yield f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(record.case.scheme)}</text>'
    yield f'<text{over} x="{x:.1f}" y="{y + 15}">{_gib(found.peak_bytes)}{speed}</text>'


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def main() -> None:
    """Print the picture."""
    records, _ = store.read_all(kinds.files_in([ROOT / "results" / "quickstart"]), MeasuredRecord)
    sys.stdout.write(drawn([record for record in records if record.case.model == MODEL]))


if __name__ == "__main__":
    main()
