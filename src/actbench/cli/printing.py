"""The output of commands: results on standard output and in files, progress and remarks on standard error."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from actbench.cli.app import LARGEST, STDOUT, Exit, file_option, option
from actbench.cli.exports import plugged_exports, text_of
from actbench.errors import UsageError, shortened
from actbench.measuring.rank import launched_rank
from actbench.model.measured import Measurement
from actbench.model.records import Failure, Record
from actbench.report.exporting import Exported
from actbench.report.plain import plain
from actbench.report.tables import Table
from actbench.report.tables.columns import CHOICES, names_in

if TYPE_CHECKING:
    from rich.console import Console

    from actbench.report.render.exports import Text
    from actbench.run.experiment import ExperimentResult
    from actbench.run.progress import Progress
    from actbench.run.tasks import Tasks

JsonOption = Annotated[Path | None, file_option("--export-json", "Write the records, or the comparison, as JSON.")]


@dataclass(frozen=True)
class TableFlags:
    """Files to write a table to."""

    export_markdown: Annotated[Path | None, file_option("--export-markdown", "Write the table as Markdown.")] = None
    export_csv: Annotated[
        Path | None, file_option("--export-csv", "Write the table as CSV, numbers in full and without units.")
    ] = None
    plugged: Mapping[str, Path | None] = field(default_factory=dict, metadata={"flags": plugged_exports})
    """Files of the formats that plug-ins bring, by the name of the flag's parameter."""

    @property
    def take_stdout(self) -> bool:
        """Whether an export goes to standard output; text for readers then goes to standard error."""
        return STDOUT in (*(getattr(self, field.name) for field in fields(self)), *self.plugged.values())


@dataclass(frozen=True)
class ExportFlags(TableFlags):
    """Files to write a table and its records to."""

    export_json: JsonOption = None


@dataclass(frozen=True)
class ResultFlags(ExportFlags):
    """Flags: which results are shown, and the files to write them to."""

    columns: Annotated[
        str | None,
        option(
            "--columns",
            "Show these columns, here and in Markdown, CSV and HTML: peak,saved,speed. Columns that distinguish rows "
            f"come first; name model, batch, scheme or meter to select those too. There are {', '.join(CHOICES)}.",
            metavar="NAMES",
        ),
    ] = None

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of the selected columns; a UsageError if there is no such column."""
        try:
            return () if self.columns is None else names_in(self.columns)
        except UsageError as error:
            raise UsageError(f"--columns: {error}") from None


@dataclass(frozen=True)
class ProgressFlags:
    """Flags: how much progress is shown."""

    quiet: Annotated[bool, option("--quiet -q", "Show no progress.")] = False
    verbose: Annotated[
        bool, option("--verbose -v", "Print a line for each case that starts or ends, on a terminal too.")
    ] = False


@dataclass(frozen=True)
class LiveFlags(ProgressFlags):
    """Flags: how much progress is shown, of which there may be more in a terminal."""

    live: Annotated[
        bool,
        option(
            "--live",
            "Show the memory of what runs in the terminal: over time, its largest holders, the step and whether it "
            "fits so far. A pipe gets nothing of it.",
        ),
    ] = False


PIPE_WIDTH = 120


def console(file: TextIO | None = None) -> Console:
    """Return a console on a stream, by default standard output; COLUMNS sets its width, a pipe's default is 120."""
    from rich.console import Console

    found = Console(file=file, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < int(columns) < LARGEST:
        found.width, found.height = int(columns), found.height  # for a dumb terminal rich uses both sizes or neither
    elif not found.is_terminal:
        found.width = PIPE_WIDTH
    return found


def plain_table(*titles: str, **details: Any) -> Any:
    """Return a table of rich's without lines."""
    from rich.table import Table

    return Table(*titles, box=None, header_style="bold", **details)


def command_line() -> str:
    """Return the command that the user typed; under a launcher, as a torchrun command."""
    found = launched_rank(os.environ)
    start = ["actbench"] if found.size == 1 else ["torchrun", "--nproc-per-node", str(found.size), "-m", "actbench"]
    return shlex.join([*start, *sys.argv[1:]])


def remark(text: str) -> None:
    """Print a text that is no result on standard error."""
    print(plain(shortened(text)), file=sys.stderr)


def call_task(
    tasks: Tasks,
    function: str,
    text: str,
    *,
    doing: str,
    timeout_seconds: float,
    memory_bytes: int | None = None,
    flags: ProgressFlags | None = None,
) -> str:
    """Call a function in a separate process, return its result, and print its output on standard error."""
    try:
        with progress_shown("", flags, as_lines=True) as progress:
            progress.doing(doing)
            return tasks.call(function, text, doing=doing, timeout_seconds=timeout_seconds, memory_bytes=memory_bytes)
    finally:
        if tasks.said:
            remark(tasks.said)


def readers(flags: TableFlags) -> TextIO:
    """Return the stream for readers: standard output, or standard error if an export takes standard output."""
    return sys.stderr if flags.take_stdout else sys.stdout


def show(*tables: Table, beside: TableFlags, all_notes: bool = True) -> None:
    """Print tables, on standard error if one of the exports ``beside`` them takes standard output."""
    from actbench.report.render import screen

    printed = console(readers(beside))
    for before, table in zip((None, *tables), tables, strict=False):
        if before is not None and before.notes:  # so that they are not read as the next table's
            printed.print()
        screen.show(table, printed, None if all_notes else screen.NOTE_LINES)


@contextmanager
def progress_shown(
    interrupted: str,
    flags: ProgressFlags | None = None,
    *,
    silent: bool = False,
    as_bar: bool = False,
    as_lines: bool = False,
) -> Iterator[Progress]:
    """Show progress inside the block; if the user interrupts it, exit with status 130 and a remark.

    With ``silent`` nothing is shown, as another process shows it. For ``as_bar`` and ``as_lines``
    see :func:`actbench.run.display.shown`.
    """
    from actbench.run.display import shown
    from actbench.run.progress import Progress

    flags = flags or ProgressFlags()
    is_shown = not (silent or flags.quiet)
    live = isinstance(flags, LiveFlags) and flags.live
    drawn = partial(shown, as_bar=as_bar, as_lines=as_lines, verbose=flags.verbose, live=live)
    made = drawn() if is_shown else nullcontext(Progress())
    try:
        with made as progress:
            yield progress
    except KeyboardInterrupt:
        if not silent:
            remark(f"actbench: interrupted{interrupted}")
        raise Exit(130) from None


def check_exports(given: Mapping[str, Any]) -> None:
    """Refuse two exports to one file, before any work begins; ``given`` has the values of a verb's flags."""
    asked = [value for name, value in given.items() if name.startswith("export_") and value]
    if asked:
        from actbench.report.render.exports import check_apart

        check_apart(path for value in asked for path in (value if isinstance(value, list) else [value]))


def export(
    flags: TableFlags,
    tables: Sequence[Table],
    json: Callable[[], Text] | None = None,
    *,
    csv: Callable[[], Table] | None = None,
    title: str | None = None,
    records: Sequence[Record[Any, Any]] = (),
) -> None:
    """Write all requested files, or none.

    Args:
        flags: The requested files.
        tables: The tables for Markdown and the formats of plug-ins, below each other.
        json: The text of JSON; needed if ``flags`` may request it.
        csv: The table for CSV; None for the first table.
        title: The heading above all tables; None for the first table's.
        records: The records that the first table shows, if it shows some.
    """
    from actbench.report.render import formats

    def exported() -> Exported:
        return Exported(tables, title or tables[0].title, records, remark)

    def markdown() -> Iterator[str]:
        for place, table in enumerate(tables):
            yield from ["\n"] * (place > 0)
            yield from formats.markdown_lines(table)

    write_files(
        (flags.export_markdown, markdown),
        (flags.export_csv, lambda: formats.csv_text(csv() if csv else tables[0])),
        (getattr(flags, "export_json", None), json or str),
        *((path, partial(text_of, name, exported)) for name, path in flags.plugged.items()),
    )


def write_files(*asked: tuple[Path | None, Callable[[], Text]]) -> None:
    """Write the texts of all requested files, or none; text for standard output comes last."""
    from actbench.report.render import exports

    texts = {path: text for path, text in asked if path is not None}
    printed = texts.pop(STDOUT, None)
    exports.export({path: text() for path, text in texts.items()})
    if texts:
        remark(f"written: {', '.join(map(str, texts))}")
    if printed is not None:
        lines = printed()
        if isinstance(lines, bytes):
            raise UsageError("-: standard output takes text, and this export is binary; name a file")
        sys.stdout.writelines([lines] if isinstance(lines, str) else lines)


def finish(
    comparison: ExperimentResult[Any],
    shown: Sequence[Table],
    verb: str = "measure",
    *,
    beside: TableFlags,
    require_fit: bool = False,
) -> None:
    """Print the tables of a result, say where it is stored or how many failed, and exit with status 1 if any case did.

    The notes of the table say why a case failed, or is over its limit.

    Args:
        comparison: The result.
        shown: Its tables.
        verb: What was done to its cases.
        beside: The exports.
        require_fit: Whether a case that is expected to run out of memory counts as failed.
    """
    show(*shown, beside=beside)
    if comparison.notice:
        remark(comparison.notice)
    summary, did = comparison.summary, f"{verb.removesuffix('e')}ed"
    counts = f"{summary.measured} {did}, {summary.failed} failed"
    if comparison.path is None and summary.failed:
        remark(counts)
    if comparison.path is not None:
        remark(counts + (f", {summary.skipped} taken from the results file" if summary.skipped else ""))
        remark(f"results: {comparison.path} (tables in the same folder, as .md and .csv)")
    outcomes = [record.outcome for record in comparison.records]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    runs_out = any(outcome.runs_out for outcome in measured)
    stopped = any(outcome.built is not None and outcome.built.failed is not None for outcome in measured)
    if stopped or any(isinstance(outcome, Failure) for outcome in outcomes) or (runs_out and require_fit):
        raise Exit(1)
