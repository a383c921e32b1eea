"""Charts as PNG or SVG, drawn by matplotlib, which need not be installed for anything else."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from typing import Any

from actbench.errors import UsageError
from actbench.plain import plain
from actbench.tables.chart import Chart, Curve

FORMATS = ("png", "svg")
_SIZE_INCHES = (7.0, 4.2)


def picture(charts: Sequence[Chart], kind: str) -> bytes:
    """Draw charts below each other in one picture.

    Args:
        charts: At least one.
        kind: ``png`` or ``svg``. The same charts give the same SVG: it holds no date and no random names.

    Raises:
        UsageError: matplotlib is not installed, the kind is neither of the two, or there is nothing to draw.
    """
    check([kind])
    if not charts:
        raise UsageError("there are no curves to draw: no run was trained to its end")
    matplotlib, figures = require()
    with matplotlib.rc_context({"svg.hashsalt": "actbench"}):
        width, height = _SIZE_INCHES
        figure = figures.Figure(figsize=(width, height * len(charts)), layout="constrained")
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            _draw(axes, chart)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()


def check(kinds: Sequence[str]) -> None:
    """Check that pictures of these kinds can be drawn here.

    Raises:
        UsageError: matplotlib is not installed, or a kind is neither ``png`` nor ``svg``.
    """
    for kind in kinds:
        if kind not in FORMATS:
            found = f"as {kind!r}" if kind else "in a file without a suffix"
            raise UsageError(f"--export-curves: curves can be drawn as {' or '.join(FORMATS)}, not {found}")
    require()


def require() -> tuple[Any, Any]:
    """Return matplotlib and its figures, which need no display.

    Raises:
        UsageError: It is not installed.
    """
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError(
            "curves as PNG or SVG are drawn by matplotlib, which is not installed: 'pip install matplotlib'; on a "
            "terminal they are drawn without it"
        ) from None


def _draw(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        _add(axes, curve)
    axes.set_title(plain(chart.title), fontsize=10, parse_math=False)
    axes.set_xlabel(plain(chart.x), parse_math=False)
    axes.set_ylabel(plain(chart.y), parse_math=False)
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)


def _add(axes: Any, curve: Curve) -> None:
    x = [point for point, _ in curve.points]
    y = [value if math.isfinite(value) else math.nan for _, value in curve.points]
    (line,) = axes.plot(x, y, label=plain(curve.label), linewidth=1.4)
    lone = curve.lone()  # no line goes to these
    axes.plot([x for x, _ in lone], [y for _, y in lone], "o", color=line.get_color(), markersize=4)
    if curve.spread:
        low = [value - spread for value, spread in zip(y, curve.spread, strict=True)]
        high = [value + spread for value, spread in zip(y, curve.spread, strict=True)]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
