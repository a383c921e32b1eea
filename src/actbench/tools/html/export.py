"""The HTML page as a format of files that commands write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from actbench.report.exporting import Curves, Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.model.measured import MeasuredRecord
    from actbench.report.render.exports import Text
    from actbench.tools.html.html import Beside
    from actbench.tools.train.records import TrainingRun

_PICTURES: Final = (".png", ".svg")


def _records(what: Exported) -> tuple[list[MeasuredRecord], list[TrainingRun]]:
    """Return the measured cases and the training runs."""
    from actbench.model.measured import MeasuredRecord
    from actbench.tools.train.records import TrainingRun

    measured = [record for record in what.records if isinstance(record, MeasuredRecord)]
    return measured, [record for record in what.records if isinstance(record, TrainingRun)]


def _page(what: Exported, beside: Beside, name: str = "the HTML page") -> Text:
    """Return a page with charts, and remark what to install if it can have none."""
    from actbench.tools.html import html, library

    if beside.has_charts and not library.is_installed():
        missing = "has tables and no charts: the library for them is missing"
        what.remark(f"{name} {missing}; {library.EXTRA} installs it")
    return html.html_lines(what.tables, what.title, beside)


def _text(what: Exported) -> Text:
    """Return a page with the charts that its records have."""
    from actbench.tools.html import charts, measured, training
    from actbench.tools.html.html import Beside, Group

    cases, runs = _records(what)
    if cases:
        return _page(what, measured.beside_measured(cases))
    if runs:
        return _page(what, training.beside_trained(runs))
    drawn = charts.curves_of_tables(what.tables).items()
    return _page(what, Beside(tuple(Group(name, (picture,)) for name, picture in drawn)))


def _check(suffix: str) -> None:
    from actbench.tools.html import library

    if suffix in _PICTURES:
        library.check()


def _curves(suffix: str, what: Exported) -> Text:
    """Return a picture of the memory over the steps of cases, or of training runs' curves; or a page with it."""
    from actbench.report.tables.step import titled_timelines
    from actbench.tools.html import library, training
    from actbench.tools.html.charts import memory_over_steps
    from actbench.tools.html.html import Beside, Group

    cases, runs = _records(what)
    pictures = training.pictures_of(runs) if runs else tuple(memory_over_steps(list(titled_timelines(cases))))
    if suffix in _PICTURES:
        return library.image(pictures, "png" if suffix == ".png" else "svg")
    return _page(what, Beside((Group(what.title, pictures),)), "the page")


def _peak(what: Exported) -> Text:
    """Return a page with a flame graph of each peak: who holds the memory, by line, module and operator."""
    from actbench.report.tables.step import titled_timelines
    from actbench.tools.html.flamegraph import flame_page

    return flame_page(what, list(titled_timelines(_records(what)[0])))


HTML: Final = ExportFormat(
    "Write one HTML page that needs no network: tables that sort and filter, charts of records (actbench[html]), "
    "settings and commands.",
    _text,
    also="--html",
    curves=Curves((*_PICTURES, ".html"), _check, _curves),
    peak=_peak,
    extras={"html": "charts of pages, and files of --export-timeline and --export-curves"},
)
