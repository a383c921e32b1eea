"""Results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actbench.cli.app import Exit
from actbench.errors import UsageError, shortened
from actbench.plain import plain

if TYPE_CHECKING:
    from actbench.experiment import Comparison
    from actbench.recipe import Recipe
    from actbench.records import Record
    from actbench.render.exports import Text
    from actbench.tables import Table


def command_line() -> str:
    """Return what the user typed."""
    return shlex.join(["actbench", *sys.argv[1:]])


def remark(text: str) -> None:
    """Say something that is no result."""
    print(plain(shortened(text)), file=sys.stderr)


def show(*tables: Table) -> None:
    """Print tables."""
    from rich.console import Console

    from actbench.render import screen

    for table in tables:
        screen.show(table, Console(highlight=False))


def run_shown(
    recipe: Recipe,
    output: Path | None,
    *,
    jobs: int | None,
    timeout: float,
    force: bool = False,
    retry_failed: bool = False,
) -> Comparison:
    """Run a recipe with its progress on standard error."""
    from actbench import experiment
    from actbench.machine import machine
    from actbench.runner import live

    try:
        with live.shown() as progress:
            return experiment.run(
                recipe,
                output,
                command=command_line(),
                jobs=jobs or machine().cores,
                timeout_seconds=timeout,
                force=force,
                retry_failed=retry_failed,
                progress=progress,
            )
    except KeyboardInterrupt:
        kept = "; rows that were finished are stored, and the same command goes on from there" if output else ""
        remark(f"actbench: interrupted{kept}")
        raise Exit(130) from None


def export_results(
    table: Table,
    records: Sequence[Record],
    markdown: Path | None = None,
    csv: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Write what was asked for, all of it or nothing."""
    from actbench.render import formats

    write_files(
        (markdown, lambda: formats.markdown_lines(table)),
        (csv, lambda: formats.csv_lines(table)),
        (json, lambda: formats.json_lines(records)),
        (html, lambda: formats.html_lines([table], table.title)),
    )


def export_table(
    table: Table,
    markdown: Path | None,
    csv: Path | None,
    json: Path | None = None,
    text: str = "",
    html: Path | None = None,
) -> None:
    """Write a table that is not of records and, as JSON, a text."""
    from actbench.render import formats

    write_files(
        (markdown, lambda: formats.markdown_lines(table)),
        (csv, lambda: formats.csv_lines(table)),
        (json, lambda: text),
        (html, lambda: formats.html_lines([table], table.title)),
    )


def write_files(*asked: tuple[Path | None, Callable[[], Text]]) -> None:
    """Write the texts whose files were asked for, all of them or nothing."""
    from actbench.render import exports

    texts = [(path, text()) for path, text in asked if path is not None]
    if len({path for path, _ in texts}) < len(texts):
        raise UsageError("two exports name the same file: give each a file of its own, or it would be written twice")
    exports.export(dict(texts))
    if texts:
        remark(f"written: {', '.join(str(path) for path, _ in texts)}")


def finish(comparison: Comparison, shown: Sequence[Table]) -> None:
    """Print the tables of a comparison, say where it is kept, and leave with status 1 if any case failed."""
    from actbench.records import Failure

    show(*shown)
    if comparison.notice:
        remark(comparison.notice)
    summary = comparison.summary
    remark(f"{summary.measured} measured, {summary.failed} failed, {summary.skipped} taken from the results file")
    if summary.skipped and not (summary.measured or summary.failed):
        remark("nothing was measured: all rows were there; --force measures again, --output FOLDER puts it elsewhere")
    if comparison.path is not None:
        remark(f"results: {comparison.path} (tables beside it, as .md and .csv)")
    failures = [(record.case, record.outcome) for record in comparison.records if isinstance(record.outcome, Failure)]
    for case, failure in failures:
        remark(f"failed: {case.model}, batch {case.batch_size}, {case.scheme} ({case.meter}): {failure.message}")
    if failures:
        raise Exit(1)
