"""The HTML page, and pictures of curves, as formats of files that commands write."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Final

from actbench.errors import UsageError
from actbench.report.exporting import Curves, Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.model.measured import MeasuredRecord
    from actbench.report.render.exports import Text
    from actbench.tools.train.records import TrainingRun

_SCALE = 2
"""Pixels of a PNG for one pixel of the chart."""


def _records(what: Exported) -> tuple[list[MeasuredRecord], list[TrainingRun]]:
    """Return the measured cases and the training runs."""
    from actbench.model.measured import MeasuredRecord
    from actbench.tools.train.records import TrainingRun

    measured = [record for record in what.records if isinstance(record, MeasuredRecord)]
    return measured, [record for record in what.records if isinstance(record, TrainingRun)]


def _text(what: Exported) -> Text:
    """Return a page with the charts that its records have."""
    from actbench.tools.html import measured, pictures, training
    from actbench.tools.html.html import Beside, Group, html_lines

    cases, runs = _records(what)
    if cases:
        beside = measured.beside_measured(cases)
    elif runs:
        beside = training.beside_trained(runs)
    else:
        drawn = pictures.curves_of_tables(what.tables).items()
        beside = Beside(tuple(Group(name, (picture,)) for name, picture in drawn))
    return html_lines(what.tables, what.title, beside)


def check(suffix: str) -> None:
    """Raise a UsageError if files of a suffix cannot be written here."""
    if suffix == ".png" and importlib.util.find_spec("vl_convert") is None:
        raise UsageError(
            "PNG is made by vl-convert-python, which is not installed: pip install 'actbench[html]', or write .svg"
        )


def _curves(suffix: str, what: Exported) -> Text:
    """Return a picture of the memory over the steps of cases, or of training runs' curves; or a page with it."""
    from actbench.report.tables.step import titled_timelines
    from actbench.tools.html import pictures, training
    from actbench.tools.html.charts import below_each_other
    from actbench.tools.html.html import Beside, Group, html_lines

    cases, runs = _records(what)
    drawn = training.pictures_of(runs) if runs else tuple(pictures.memory_over_steps(list(titled_timelines(cases))))
    if suffix == ".html":
        return html_lines(what.tables, what.title, Beside((Group(what.title, drawn),)))
    svg = below_each_other(drawn)
    return svg if suffix == ".svg" else bytes(importlib.import_module("vl_convert").svg_to_png(svg, scale=_SCALE))


def _peak(what: Exported) -> Text:
    """Return a page with a flame graph of each peak: who holds the memory, by line, module and operator."""
    from actbench.report.tables.step import titled_timelines
    from actbench.tools.html.flamegraph import flame_page

    return flame_page(what, list(titled_timelines(_records(what)[0])))


HTML: Final = ExportFormat(
    "Write one HTML page that needs no network: tables that sort and filter, charts of records, settings and commands.",
    _text,
    also="--html",
    curves=Curves((".png", ".svg", ".html"), check, _curves),
    peak=_peak,
    extras={"html": ".png files of --export-timeline and --export-curves"},
)
