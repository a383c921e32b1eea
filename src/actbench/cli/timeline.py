"""``measure --timeline``: where the memory is over a step, and files that show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from actbench.cli.app import STDOUT, option, path_named
from actbench.cli.exports import formats_plugged
from actbench.cli.printing import ProgressFlags, ResultFlags, call_task, console, readers, remark, show, write_files
from actbench.errors import UsageError
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.timeline import Timeline
from actbench.report.exporting import Curves, Exported
from actbench.report.tables import Table
from actbench.tempfiles import temporary_folder

if TYPE_CHECKING:
    from rich.console import Console

    from actbench.report.render.exports import Text

_TITLE = "Memory over a step"
_PEAK = "Who holds the peak"
_JSON, _HTML = ".json", ".html"


@dataclass(frozen=True)
class CurveFlags:
    """Flags: whether to show the memory over the step, and a file for it."""

    timeline: Annotated[
        bool,
        option(
            "--timeline",
            "Show the memory over the step too, and the ten largest holders at its peak by module, kind and operator; "
            "records, --export-json and --html have it then.",
        ),
    ] = False
    export_timeline: Annotated[
        Path | None,
        option(
            "--export-timeline",
            "Write the timelines as .svg, .png (by actbench[html]), .html or .json.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None
    export_flamegraph: Annotated[
        Path | None,
        option(
            "--export-flamegraph",
            "Write one HTML page of who holds the peak, and by a slider other moments of the step: stacks of line, "
            "module and operator, as wide as their bytes.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None
    export_speedscope: Annotated[
        Path | None,
        option(
            "--export-speedscope",
            "Write who holds the peak as .json for speedscope.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None
    export_perfetto: Annotated[
        Path | None,
        option(
            "--export-perfetto",
            "Write the memory over the step as counters, .json for Perfetto and chrome://tracing.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None

    @property
    def files(self) -> dict[str, Path]:
        """The files that are requested, by the names of their flags."""
        named = ("timeline", "flamegraph", "speedscope", "perfetto")
        asked = {f"--export-{name}": getattr(self, f"export_{name}") for name in named}
        return {flag: file for flag, file in asked.items() if file is not None}

    @property
    def wanted(self) -> bool:
        """Whether to record timelines."""
        return self.timeline or bool(self.files)

    def check(self) -> None:
        """Check the files before anything runs.

        Raises:
            UsageError: A file has another suffix, needs a library that is missing, or is standard output.
            StoreError: A file cannot be written.
        """
        from actbench.report.render import exports

        formats = curve_formats()
        suffixes = {"--export-timeline": (*formats, _JSON), "--export-flamegraph": (_HTML,)}
        for flag, file in self.files.items():
            known = suffixes.get(flag, (_JSON,))
            if file.suffix not in known:
                raise UsageError(f"{flag} {file}: name a file that ends in {', '.join(known)}")
            if flag == "--export-timeline" and file.suffix in formats:
                formats[file.suffix].check(file.suffix)
            exports.check_writable(file)
        exports.check_apart(self.files.values())


@dataclass(frozen=True)
class TimelineFlags(CurveFlags):
    """Flags: whether to show the memory over the step, and files for it and for its allocations."""

    export_snapshot: Annotated[
        Path | None,
        option(
            "--export-snapshot",
            "Run the step once more and write a file for PyTorch's memory visualiser (pytorch.org/memory_viz), such as "
            "FILE.pickle; each of several cases gets its own file, FILE-SCHEME.pickle.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None
    export_trace: Annotated[
        Path | None,
        option(
            "--export-trace",
            "Simulate the step once more and write what it allocates, frees and runs, cut at the blocks of the model, "
            "as lines of JSON; each of several cases gets its own file.",
            only_typed=True,
            metavar="FILE",
            parser=path_named,
        ),
    ] = None

    def check(self) -> None:
        """Check the files before anything runs; see :meth:`CurveFlags.check`."""
        from actbench.report.render import exports

        if self.export_trace == STDOUT:
            raise UsageError("--export-trace -: name a file")
        if self.export_snapshot == STDOUT:
            raise UsageError("--export-snapshot -: a pickle is not text; name a file")
        super().check()
        for file in (self.export_snapshot, self.export_trace):
            if file is not None:
                exports.check_writable(file)


def tables_of(records: Sequence[MeasuredRecord]) -> list[Table]:
    """Return a table of the holders at the peak of each case."""
    from actbench.report.tables.step import holders_table, titled_timelines

    return [holders_table(title, timeline) for title, timeline in titled_timelines(records, alone=False)]


def show_timelines(records: Sequence[MeasuredRecord], exports: ResultFlags) -> None:
    """Print the holders at the peak of each case, and its memory over the step as a line."""
    from actbench.report.tables.step import with_timelines

    for table, (_, timeline) in zip(tables_of(records), with_timelines(records), strict=True):
        show(table, beside=exports)
        printed = console(readers(exports))
        for line in line_of(timeline, printed):
            printed.print(line, markup=False, soft_wrap=True)
        printed.print()


def line_of(timeline: Timeline, printed: Console) -> list[str]:
    """Return a timeline as a line of text, in ASCII for pipes and terminals without block characters."""
    from actbench.report.render.screen import sparkline

    has_blocks = printed.is_terminal and not printed.is_dumb_terminal and not printed.options.ascii_only
    return sparkline(timeline, printed.width, ascii_only=not has_blocks)


def export_timelines(records: Sequence[MeasuredRecord], flags: CurveFlags) -> None:
    """Write the timelines of measured cases, if requested."""
    from actbench.report.tables.step import with_timelines

    if not list(with_timelines(records)):
        for file in flags.files.values():
            remark(f"{file} is not written: no case was measured")
        return
    write_files(*((file, _writer(records, flag, file)) for flag, file in flags.files.items()))


def curve_formats() -> dict[str, Curves]:
    """Return what draws curves, by the suffixes of its files."""
    found = (each.curves for _, each in formats_plugged().values())
    return {suffix: curves for curves in found if curves is not None for suffix in curves.suffixes}


def _writer(records: Sequence[MeasuredRecord], flag: str, file: Path) -> Callable[[], Text]:
    from actbench.report.render.stacks import perfetto, speedscope
    from actbench.report.tables.step import titled_timelines, with_timelines

    def as_json() -> Text:
        found = [
            {"case": record.case.model_dump(mode="json"), "timeline": timeline.model_dump(mode="json")}
            for record, timeline in with_timelines(records)
        ]
        return json.dumps(found, indent=2) + "\n"

    def drawn() -> Text:
        title = _PEAK if flag == "--export-flamegraph" else _TITLE
        shown = Exported(tables_of(records), title, records, lambda text: remark(f"{file}: {text}"))
        if flag == "--export-flamegraph":
            return next(each.peak for _, each in formats_plugged().values() if each.peak is not None)(shown)
        return curve_formats()[file.suffix].text(file.suffix, shown)

    if flag in (texts := {"--export-speedscope": speedscope, "--export-perfetto": perfetto}):
        return lambda: texts[flag](list(titled_timelines(records)))
    return as_json if file.suffix == _JSON else drawn


def export_again(
    records: Sequence[MeasuredRecord], flags: TimelineFlags, progress: ProgressFlags, *, timeout: float
) -> None:
    """Run each measured case once more for each file that is requested; an ActbenchError if it fails now."""
    _export_each(records, flags.export_snapshot, "write_snapshot", progress, timeout)
    simulated = [record for record in records if record.case.meter == "simulated"]
    _export_each(simulated, flags.export_trace, "write_trace", progress, timeout)


def _export_each(
    records: Sequence[MeasuredRecord], target: Path | None, task: str, progress: ProgressFlags, timeout: float
) -> None:
    if target is None:
        return
    from actbench.measuring.timelines import FileRequest  # which imports torch and all schemes
    from actbench.run.executor import PRELOAD
    from actbench.run.tasks import Tasks

    measured = [record for record in records if isinstance(record.outcome, Measurement)]
    if not measured:
        remark(f"{target} is not written: no case was {'measured' if task == 'write_snapshot' else 'simulated'}")
        return
    with temporary_folder() as folder, Tasks("actbench.measuring.timelines", PRELOAD) as tasks:
        made = folder / "made"
        for record, file in zip(measured, files_of(target, measured), strict=True):
            request = FileRequest(case=record.case, path=made).model_dump_json()
            doing = f"recording the allocations of {record.case.name}"
            call_task(tasks, task, request, doing=doing, timeout_seconds=timeout, flags=progress)
            write_files((file, made.read_bytes))


def files_of(file: Path, records: Sequence[MeasuredRecord]) -> list[Path]:
    """Return the file of each case: the named file if there is one case, else one for each scheme and its settings."""
    from actbench.report.tables.groups import varying_settings

    if len(records) == 1:
        return [file]
    files: list[Path] = []
    settings = varying_settings([record.case for record in records])
    for record, varying in zip(records, settings, strict=True):
        case, also = record.case, [f"{name}-{value}" for name, value in varying.items()]
        first = (case.scheme, *also)
        for words in (first, (*first, case.meter, case.batch_size), (*first, len(files))):
            place = file.with_stem("-".join([file.stem, *map(_slug, words)]))
            if place not in files:
                files.append(place)
                break
    return files


def _slug(word: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(word)).strip("-")
