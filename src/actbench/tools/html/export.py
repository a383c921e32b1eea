"""The HTML page as a format of files that commands write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from actbench.report.exporting import Curves, Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.report.render.exports import Text


def _text(what: Exported) -> Text:
    """Return a page with the charts that its records have, and remark what to install if it can have none."""
    from actbench.model.measured import MeasuredRecord
    from actbench.tools.html import frontier, memory, training
    from actbench.tools.html.html import html_lines
    from actbench.tools.html.library import EXTRA, is_installed
    from actbench.tools.train.records import TrainingRun

    if measured := [record for record in what.records if isinstance(record, MeasuredRecord)]:
        beside = memory.beside_measured(measured)
    elif trained := [record for record in what.records if isinstance(record, TrainingRun)]:
        beside = training.beside_trained(trained)
    else:
        beside = frontier.curves_of_tables(what.tables)
    if beside.has_charts and not is_installed():
        what.remark(f"the HTML page has tables and no charts: the library for them is missing; {EXTRA} installs it")
    return html_lines(what.tables, what.title, beside)


def _peak(what: Exported) -> Text:
    """Return a page with a flame graph of each peak."""
    from actbench.tools.html.flamegraph import drawn

    return drawn(what)


_PICTURES: Final = (".png", ".svg")


def _check(suffix: str) -> None:
    from actbench.tools.html import library

    if suffix in _PICTURES:
        library.check()


def _curves(suffix: str, what: Exported) -> Text:
    """Return a picture of the memory over the steps of cases, or of training runs' curves; or a page with it."""
    from actbench.model.measured import MeasuredRecord
    from actbench.report.tables.step import titled_timelines
    from actbench.tools.html import library
    from actbench.tools.html.html import html_lines
    from actbench.tools.html.pictures import Beside, Group
    from actbench.tools.html.timeline import memory_over_steps
    from actbench.tools.html.training import pictures_of
    from actbench.tools.train.records import TrainingRun

    if trained := [record for record in what.records if isinstance(record, TrainingRun)]:
        pictures = pictures_of(trained)
    else:
        measured = [record for record in what.records if isinstance(record, MeasuredRecord)]
        pictures = tuple(memory_over_steps(list(titled_timelines(measured))))
    if suffix in _PICTURES:
        return library.image(pictures, "png" if suffix == ".png" else "svg")
    if not library.is_installed():
        what.remark(f"the page has tables and no charts: the library for them is missing; {library.EXTRA} installs it")
    return html_lines(what.tables, what.title, Beside((Group(what.title, pictures),)))


HTML: Final = ExportFormat(
    "Write one HTML page that needs no network: tables that sort and filter, charts of records (actbench[html]), "
    "settings and commands.",
    _text,
    also="--html",
    curves=Curves((*_PICTURES, ".html"), _check, _curves),
    peak=_peak,
    extras={"html": "charts of pages, and files of --export-timeline and --export-curves"},
)
