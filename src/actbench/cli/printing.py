"""The output of commands: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from actbench.cli.app import STDOUT, Exit
from actbench.cli.consoles import console
from actbench.errors import UsageError, shortened
from actbench.measuring import launch
from actbench.results.plain import plain

if TYPE_CHECKING:
    from actbench.cli.outputs import TableFlags
    from actbench.experiments.experiment import ExperimentResult
    from actbench.experiments.runner.progress import Progress
    from actbench.experiments.runner.tasks import Tasks
    from actbench.results.render.exports import Text
    from actbench.results.render.page.pictures import Beside
    from actbench.results.tables import Table


class Tolerant:
    """A stream that remembers its first write error and drops all later text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the buffer, or drop it."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Discard the buffer, which Python would try to write again at exit."""
        self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(io.UnsupportedOperation, ValueError):  # a stream without a file
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def tolerant() -> Iterator[Tolerant]:
    """Replace standard output and error by tolerant streams, and yield the one for output."""
    streams = sys.stdout, sys.stderr
    with ExitStack() as opened:
        # A stream is None if the parent process closed it.
        written = [one or opened.enter_context(open(os.devnull, "w")) for one in streams]
        for one in written:
            opened.enter_context(_replacing(one))
        out, err = map(Tolerant, written)
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = streams


@contextmanager
def _replacing(stream: TextIO) -> Iterator[None]:
    """Let a stream write ``?`` for characters that its encoding lacks."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors=before)


FAILED = 2


@contextmanager
def explained_exits() -> Iterator[None]:
    """While a command runs, make ``os._exit`` name its caller and exit with status 2.

    A model's file, a loss or a callback may call it, and the command would end silently with status 0. Forked
    processes keep the original ``os._exit``.
    """
    own, process = os._exit, os.getpid()

    def leave(status: int) -> Any:
        if os.getpid() != process:
            own(status)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream may be closed
                stream.flush()
        with suppress(Exception):
            print(f"actbench: {place} called os._exit({status}): the command ended there", file=sys.stderr, flush=True)
        own(FAILED)

    setattr(os, "_exit", leave)  # noqa: B010  (type checkers refuse a plain assignment)
    try:
        yield
    finally:
        setattr(os, "_exit", own)  # noqa: B010


def command_line() -> str:
    """Return what the user typed; of several processes, in the words of torchrun."""
    found = launch.place(os.environ)
    start = ["actbench"] if found.size == 1 else ["torchrun", "--nproc-per-node", str(found.size), "-m", "actbench"]
    return shlex.join([*start, *sys.argv[1:]])


def remark(text: str) -> None:
    """Print a text that is no result on standard error."""
    print(plain(shortened(text)), file=sys.stderr)


def call_task(
    tasks: Tasks, function: str, text: str, *, doing: str, timeout_seconds: float, memory_bytes: int | None = None
) -> str:
    """Call a function in a separate process, return its result, and remark what it printed."""
    try:
        return tasks.call(function, text, doing=doing, timeout_seconds=timeout_seconds, memory_bytes=memory_bytes)
    finally:
        if tasks.said:
            remark(tasks.said)


def readers(flags: TableFlags) -> TextIO:
    """Return the stream for readers: standard output, or standard error if an export takes standard output."""
    return sys.stderr if flags.take_stdout else sys.stdout


def show(*tables: Table, beside: TableFlags) -> None:
    """Print tables; ``beside`` are the exports, one of which may take standard output."""
    from actbench.results.render import screen

    for table in tables:
        screen.show(table, console(readers(beside)))


@contextmanager
def progress_shown(interrupted: str, *, silent: bool = False, as_bar: bool = False) -> Iterator[Progress]:
    """Show progress inside the block; if the user interrupts it, exit with status 130 and a remark.

    With ``silent`` nothing is shown, as another process shows it. For ``as_bar`` see
    :func:`actbench.experiments.runner.progress.shown`.
    """
    from actbench.experiments.runner.progress import Progress, shown

    try:
        with nullcontext(Progress()) if silent else shown(as_bar=as_bar) as progress:
            yield progress
    except KeyboardInterrupt:
        if not silent:
            remark(f"actbench: interrupted{interrupted}")
        raise Exit(130) from None


def export(
    flags: TableFlags,
    tables: Sequence[Table],
    json: Callable[[], Text] | None = None,
    *,
    csv: Callable[[], Table] | None = None,
    title: str | None = None,
    beside: Callable[[], Beside] | None = None,
) -> None:
    """Write all requested files, or none.

    Args:
        flags: The requested files.
        tables: The tables for Markdown and HTML, below each other.
        json: The text of JSON; needed if ``flags`` may request it.
        csv: The table for CSV; None for the first table.
        title: The title of the HTML page; None for the first table's.
        beside: What the HTML page shows beside its tables.
    """
    from actbench.results.render import formats

    def markdown() -> Iterator[str]:
        for place, table in enumerate(tables):
            yield from ["\n"] * (place > 0)
            yield from formats.markdown_lines(table)

    write_files(
        (flags.export_markdown, markdown),
        (flags.export_csv, lambda: formats.csv_lines(csv() if csv else tables[0])),
        (getattr(flags, "export_json", None), json or str),
        (flags.export_html, lambda: html_page(tables, title or tables[0].title, beside)),
    )


def html_page(tables: Sequence[Table], title: str, beside: Callable[[], Beside] | None) -> Text:
    """Return an HTML page, and remark what to install if charts are missing."""
    from actbench.results.render import page
    from actbench.results.render.page import library

    found = beside() if beside else None
    if found is not None and found.has_charts and not library.is_installed():
        remark(f"the HTML page has tables and no charts: the library for them is missing; {library.EXTRA} installs it")
    return page.html_lines(tables, title, found)


def write_files(*asked: tuple[Path | None, Callable[[], Text]]) -> None:
    """Write the texts of all requested files, or none; text for standard output comes last."""
    from actbench.results.render import exports

    texts = {path: text for path, text in asked if path is not None}
    if len(texts) < sum(path is not None for path, _ in asked):
        raise UsageError("two exports name the same file: give each a file of its own, or it would be written twice")
    printed = texts.pop(STDOUT, None)
    exports.export({path: text() for path, text in texts.items()})
    if texts:
        remark(f"written: {', '.join(map(str, texts))}")
    if printed is not None:
        lines = printed()
        sys.stdout.writelines([lines] if isinstance(lines, str) else cast("Iterable[str]", lines))


def finish(
    comparison: ExperimentResult[Any],
    shown: Sequence[Table],
    verb: str = "measure",
    *,
    beside: TableFlags,
    require_fit: bool = False,
) -> None:
    """Print the tables of a result, say where it is stored, and exit with status 1 if any case failed.

    The notes of the table say why a case failed, or is over its limit.

    Args:
        comparison: The result.
        shown: Its tables.
        verb: What was done to its cases.
        beside: The exports.
        require_fit: Whether a case that does not fit counts as failed.
    """
    from actbench.results.measured import Measurement
    from actbench.results.records import Failure

    show(*shown, beside=beside)
    if comparison.notice:
        remark(comparison.notice)
    summary, did = comparison.summary, f"{verb.removesuffix('e')}ed"
    remark(f"{summary.measured} {did}, {summary.failed} failed, {summary.skipped} taken from the results file")
    if summary.skipped and not (summary.measured or summary.failed):
        remark(f"nothing was {did}: all rows were there; --force {verb}s again, --output FOLDER puts it elsewhere")
    if comparison.path is not None:
        remark(f"results: {comparison.path} (tables beside it, as .md and .csv)")
    outcomes = [record.outcome for record in comparison.records]
    over_limit = any(isinstance(outcome, Measurement) and not outcome.fits for outcome in outcomes)
    if any(isinstance(outcome, Failure) for outcome in outcomes) or (over_limit and require_fit):
        raise Exit(1)
