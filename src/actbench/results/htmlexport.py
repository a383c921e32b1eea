"""The HTML page as a format of files that commands write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from actbench.results.exporting import Exported, ExportFormat

if TYPE_CHECKING:
    from actbench.results.render.exports import Text


def _text(what: Exported) -> Text:
    """Return a page with the charts that its records have, and remark what to install if it can have none."""
    from actbench.results.measured import MeasuredRecord
    from actbench.results.render.page import html_lines, memory, training
    from actbench.results.render.page.library import EXTRA, is_installed
    from actbench.results.runs import TrainingRun

    beside = None
    if measured := [record for record in what.records if isinstance(record, MeasuredRecord)]:
        beside = memory.beside_measured(measured)
    elif trained := [record for record in what.records if isinstance(record, TrainingRun)]:
        beside = training.beside_trained(trained)
    if beside is not None and beside.has_charts and not is_installed():
        what.remark(f"the HTML page has tables and no charts: the library for them is missing; {EXTRA} installs it")
    return html_lines(what.tables, what.title, beside)


HTML: Final = ExportFormat(
    "Write one HTML page that needs no network: tables that sort and filter, charts of records (actbench[html]), "
    "settings and commands.",
    _text,
    also="--html",
)
