from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from actbench.cli.app import Exit, argument, command, file_option, option, path_named
from actbench.cli.flags import expanded
from actbench.cli.printing import ExportFlags, ResultFlags, export, readers, remark, show, write_files
from actbench.errors import UsageError

if TYPE_CHECKING:
    from actbench.report.kinds import Kind

ResultsArgument = Annotated[
    list[Path], argument("RESULTS…", "Results files (.jsonl), or folders that hold some.", path_named)
]


@command(rank=70, usual="--columns --title --verbose --export-markdown --export-csv --export-html")
@expanded
def report(
    *,
    results: ResultsArgument,
    title: Annotated[str, option("--title", "Heading of the table.", metavar="TEXT")] = "Results",
    verbose: Annotated[bool, option("--verbose -v", "Show all notes below the table, however many lines.")] = False,
    exports: ResultFlags,
) -> None:
    """Print results files as one table, and export it.

    The last of several records of one case counts. A column distinguishes rows of different machines. Training runs
    (.runs.jsonl) and fits (.fit.jsonl) have their own tables: name such files, or a folder with only such files.

    A terminal shows the first 500 rows and says how many there are. A pipe gets every row, in 120 columns or COLUMNS,
    and so does every export.

    Examples:

    actbench report results

    actbench report results/quickstart/*.jsonl --export-markdown table.md --export-csv table.csv

    COLUMNS=400 actbench report results | less -S

    actbench report results/quickstart --html report.html

    actbench report results --columns scheme,peak,saved --export-markdown -

    actbench report results/accuracy --html accuracy.html
    """
    from actbench.report import kinds, store, tables
    from actbench.report.render.formats import json_lines
    from actbench.report.tabled import TabledRecord

    columns = exports.chosen
    kind, files = kinds.kind_in(results)
    if kind is not kinds.MEASURED:
        _report_other(kind, files, title, exports)
        return
    records, notices = store.read_all(files, TabledRecord if exports.export_json is None else kinds.MEASURED.record)
    for notice in notices:
        remark(notice)
    shown = tables.report_tables(records, title, columns)
    if exports.export_json is None and not any(exports.plugged.values()):
        records = []  # with many rows they take most of the memory
    show(*shown, beside=exports, all_notes=verbose)
    export(exports, shown[:1], lambda: json_lines(records), records=records)


def _report_other(kind: Kind[Any], files: list[Path], title: str, exports: ResultFlags) -> None:
    from actbench.report.render.formats import json_lines
    from actbench.report.store import read_all

    if exports.columns:
        raise UsageError(f"--columns is for measured cases, and {files[0]} holds other records: leave it out")
    records, notices = read_all(files, kind.record)
    for notice in notices:
        remark(notice)
    shown = kind.tables(records, title)
    show(*shown, beside=exports)
    export(exports, shown, lambda: json_lines(records), records=records)


@dataclass(frozen=True)
class CompareFlags(ExportFlags):
    """Files to write a comparison to."""

    export_junit: Annotated[
        Path | None,
        file_option("--export-junit", "Write the result of each limit of --fail-on, case by case, as JUnit XML."),
    ] = None


@command(rank=80, usual="--fail-on --format --export-markdown --export-html --export-junit")
@expanded
def compare(
    *,
    before: Annotated[
        Path, argument("A", "The results file (.jsonl) to compare against, or a folder that holds some.", path_named)
    ],
    after: Annotated[Path, argument("B", "The results file that is compared, or a folder.", path_named)],
    fail_on: Annotated[
        list[str] | None,
        option(
            "--fail-on",
            "Exit with status 1 if a case gets worse than this: peak:5%, throughput:10%, largest_batch:0%, peak:>8GiB.",
            metavar="LIMIT",
        ),
    ] = None,
    told_as: Annotated[
        Literal["text", "github"],
        option(
            "--format",
            "How broken limits are reported: text, or github, as errors of a run of GitHub Actions.",
            metavar="text|github",
        ),
    ] = "text",
    exports: CompareFlags,
) -> None:
    """Compare two results files case by case, or two folders of them; the gate for continuous integration.

    Exit status: 0 all limits hold, 1 one is broken, 2 wrong usage.

    Examples:

    actbench compare old.jsonl new.jsonl

    actbench compare old.jsonl new.jsonl --fail-on peak:5% --fail-on throughput:10%

    actbench compare results-of-main results --html changes.html --export-json changes.json

    actbench compare results-of-main results --fail-on peak:2% --format github --export-junit memory.xml
    """
    from actbench.report import gates, kinds, store
    from actbench.report.compare import compare as compared, parse_limit
    from actbench.report.tabled import TabledRecord

    if not fail_on and (exports.export_junit is not None or told_as == "github"):
        raise UsageError("--export-junit and --format github report limits: give --fail-on too, or leave them out")

    limits = [parse_limit(text) for text in fail_on or []]
    first, first_notices = store.read_all(kinds.files_in([before]), TabledRecord)
    second, second_notices = store.read_all(kinds.files_in([after]), TabledRecord)
    for notice in [*first_notices, *second_notices]:
        remark(notice)
    comparison = compared(first, second, limits)
    show(comparison.table, beside=exports)
    export(exports, [comparison.table], comparison.as_json)
    write_files((exports.export_junit, lambda: gates.junit(comparison)))
    if told_as == "github":
        for line in gates.github_lines(comparison):
            print(line, file=readers(exports))
    else:
        for violation in comparison.violations:
            remark(f"limit broken: {violation}")
    if comparison.violations:
        raise Exit(1)
