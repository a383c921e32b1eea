"""Simulated peaks beside those that others measured on real GPUs.

::

    .venv/bin/python benchmarks/published_peaks.py simulate    # what has no record yet, to results/published-peaks
    .venv/bin/python benchmarks/published_peaks.py page        # docs/published-peaks.md, from the records

The figures stand in ``published_peaks.toml`` with the command of each, and those of a source with many in a table of
its own (``published_settings.py``). ``simulate`` stores each case as it ends, so it can be stopped and run again; with
a word after it, only rows whose command has the word are simulated.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actbench.measuring.bench import measure
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case
from actbench.report import store
from actbench.report.kinds import MEASURED
from actbench.report.tables.values import write
from actbench.run import runner
from actbench.run.experiment import finished
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.scheme import build
from actbench.units import GIB

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLES = tomllib.loads((HERE / "published_peaks.toml").read_text())
SETTINGS = runpy.run_path(str(HERE / "published_settings.py"))
_FILES = (
    "published_fms.toml",
    "published_liger.toml",
    "published_sdpa.toml",
    "published_mmseg.toml",
    "published_mmseg_others.toml",
    "published_mmaction.toml",
    "published_mmseg_late.toml",
)
MANY = [tomllib.loads((HERE / name).read_text()) for name in _FILES]
NAME = "published-peaks"
TITLE = "How close do simulated peaks come to those that others measured on real GPUs?"
LARGE = 0.05
"""Relative errors above this one are explained in words."""
SMALL = 0.03

UNSTATED = {
    "kind": "what the figure counts",
    "unit": "its unit",
    "batch": "the batch",
    "length": "the length of the longest batch",
    "image size": "the image size",
    "adapters": "which layers have adapters",
}
"""What may decide a peak and not be stated in its source."""

Row = Mapping[str, Any]

_HEAD = f"""\
# Published peaks

{TITLE} `benchmarks/published_peaks.py` makes this page from `benchmarks/published_peaks.toml`, which has the figures
with their sources, and from the records in [results/{NAME}](../results/{NAME}). To simulate a row again, type
`actbench measure` and the row's command. Peaks of whole training scripts, which `actbench run` runs as they are, count
in the table by source, too; their rows stand in [public-scripts.md](public-scripts.md).

*Kind* says what was counted: memory **allocated** by torch's tensors (`max_memory_allocated`, or "active" memory);
memory **reserved** by torch's allocator; or memory of the **device** by `nvidia-smi`, less the context that the source
states. The simulated figure is of the same kind. If the source does not state the kind (**not stated**), the simulated
figure is the reserved one; figures of the device are compared with it, too. *Class* says which side is off: none
(**agrees**); the published figure, which is of **other** software or counts something else; the **setting**, which
actbench cannot express; or **ours**, the simulation. Each row with an error above 5 % gives the reason.

Each row is simulated as the torch that was measured ran it: `--torch-era` ([step.md](step.md)). Where the source does
not name its torch, the era is by the date of the source; none that does not is younger than torch 2.11. Torch 2.0 to
2.10 are taken for 2.11, the oldest of which the workspaces of cuBLAS were read.

The setting of a row is *known* if its source (its text, configuration, script or log) states what decides the peak:
what the figure counts and in which unit, the model and its adapters, the batch, and the length or image size of the
step with the peak, of which an upper limit is no statement. A row whose source leaves one of these open says which,
whatever its error is. Names of GPUs and versions of software are not asked for.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate what has no record yet, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "page"))
    parser.add_argument("word", nargs="?", default="", help="simulate only commands with this in them")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder of the records")
    asked = parser.parse_args(arguments)
    if asked.what == "simulate":
        simulate((row for row in runnable() if asked.word in row["command"]), asked.output)
    else:
        (ROOT / "docs" / f"{NAME}.md").write_text(page(records(asked.output)))


def runnable() -> list[Row]:
    """Return the rows that have a command."""
    named = [row for row in TABLES["figure"] if "command" in row]
    return [*named, *(row for table in MANY for row in SETTINGS["rows"](table))]


def case_of(command: str) -> Case:
    """Return the case of a command, as records have it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("-b", dest="batch_size", type=int)
    parser.add_argument("-s", dest="scheme", default="exact")
    for name in ("sequence_length", "target_length", "image_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    for name in ("attention", "dtype", "autocast", "optimizer", "task", "device_profile", "torch_era"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS)
    given = vars(parser.parse_args(shlex.split(command)))
    return Case(**{**given, "scheme": build(given["scheme"]).spec}, meter="simulated")


def simulate(rows: Iterable[Row], output: Path) -> None:
    """Simulate the cases of rows that have no record yet, one after the other, in processes of their own."""
    os.chdir(ROOT)  # commands name files from there
    found, in_order = records(output), sorted(rows, key=lambda row: row.get("unseen", False))  # what is looked at last
    plan = [Planned(case) for row in in_order if (case := case_of(row["command"])) not in found]
    with MEASURED.opened(NAME, output) as opened:
        command = shlex.join(["benchmarks/published_peaks.py", *sys.argv[1:]])
        summary = runner.run_plan(plan, opened, recipe=NAME, command=command, progress=Told())
        every = [Planned(record.case) for record in opened.records]
        finished(MEASURED, opened, every, summary, NAME, output)


class Told(Progress):
    """Prints each case that ended."""

    def finished(self, case: Case, outcome: Any) -> None:
        """Print the case with its peak, or why it failed."""
        print(
            case.title, outcome.message if outcome.kind == "failed" else write(outcome.peak_bytes, "bytes"), flush=True
        )


def records(output: Path = ROOT / "results") -> dict[Case, MeasuredRecord]:
    """Return the record of each case that was measured."""
    found = [store.read_results(file).records for file in sorted((output / NAME).glob("*.jsonl"))]
    measured = (record for each in found for record in each if isinstance(record.outcome, Measurement))
    return {record.case: record for record in measured}


def figure(row: Row, measured: Measurement) -> int:
    """Return the bytes of a simulated step that the published figure of a row counts."""
    if row.get("phase"):
        assert measured.phase_peaks is not None
        return getattr(measured.phase_peaks, f"{row['phase']}_bytes")
    found = measured.peak_bytes if row["kind"] == "allocated" else measured.reserved_bytes
    assert found is not None
    return found


def error(row: Row, measured: Measurement) -> float:
    """Return the relative error of the simulated figure."""
    return figure(row, measured) / (row["published_gib"] * GIB) - 1


def is_known(row: Row) -> bool:
    """Return whether the source of a row states what decides the peak."""
    return not row["unstated"]


def simulated_now(row: Row) -> int:
    """Return the figure of a row, simulated in this process."""
    return figure(row, measure(case_of(row["command"])))


def page(found: Mapping[Case, MeasuredRecord]) -> str:
    """Return the page."""
    measured = [(row, _measured(row, found)) for row in runnable() if case_of(row["command"]) in found]
    sources = dict.fromkeys(row["source"] for row, _ in measured)
    grouped = {source: [(row, each) for row, each in measured if row["source"] == source] for source in sources}
    return "\n".join(
        [
            _HEAD,
            *_summary(measured, grouped),
            *(line for source, rows in grouped.items() for line in _section(source, rows)),
            *_inexpressible(),
            *_waiting(found),
            *_left_out(),
        ]
    )


def _measured(row: Row, found: Mapping[Case, MeasuredRecord]) -> Measurement:
    outcome = found[case_of(row["command"])].outcome
    assert isinstance(outcome, Measurement), row["command"]
    return outcome


Measured = Sequence[tuple[Row, Measurement]]


def _summary(measured: Measured, grouped: Mapping[str, Measured]) -> Iterator[str]:
    yield "| Source | Rows | Median error | Worst error | Rows above 5 % | Within 3 % |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    scripts = list(_of_scripts())
    rows = [(source, *_errors(pairs)) for source, pairs in grouped.items()]
    every = [error for _, errors, _ in [*rows, *scripts] for error in errors]
    unseen = [error for _, _, errors in [*rows, *scripts] for error in errors]
    for source, errors, drawn in [*rows, *scripts, ("**All**", every, unseen)]:
        yield _line(source, *_spread(errors))
        if drawn:
            yield _line("of these, drawn before any was simulated and looked at last", *_spread(drawn))
    whole, drawn = _errors([pair for pair in measured if pair[0].get("whole", True)])
    whole += [error for _, errors, _ in scripts for error in errors]
    drawn += [error for _, _, errors in scripts for error in errors]
    yield _line("**Whole models: all but layers and losses alone**", *_spread(whole))
    yield _line("of these, drawn before any was simulated and looked at last", *_spread(drawn))
    known, _ = _errors([pair for pair in measured if is_known(pair[0])])
    yield _line("**Rows whose setting is known**", *_spread(known))
    expressed, _ = _errors([pair for pair in measured if pair[0]["class"] in ("agrees", "ours")])
    yield _line("**Classes agrees and ours: what can be expressed, of the same software**", *_spread(expressed))
    yield "\nRows whose setting is known, and classes, are of the tables below.\n"


Errors = list[float]


def _errors(rows: Measured) -> tuple[Errors, Errors]:
    """Return the errors of rows, and of those that are looked at last."""
    return (
        [error(row, each) for row, each in rows],
        [error(row, each) for row, each in rows if row.get("unseen")],
    )


def _of_scripts() -> Iterator[tuple[str, Errors, Errors]]:
    """Yield the sources of scripts whose authors published peaks, with the errors, and those that are looked at last.

    A script has one: of what was allocated, or of what was reserved where no script of the source has the other.
    """
    folder = str(HERE / "public")
    sys.path.insert(0, folder)
    public = runpy.run_path(str(HERE / "public" / "scripts.py"))
    sys.path.remove(folder)
    for name, table in public["sources"]().items():
        found, drawn = public["results"](name), public["unseen"](table)
        kind = "allocated" if any("allocated_mib" in script for script in table["script"]) else "reserved"
        errors = {each["name"]: public["error"](each, found.get(each["name"], {}), kind) for each in table["script"]}
        known = {script: off for script, off in errors.items() if off is not None}
        if known:
            title = f"{table['repository']}, scripts as they are ([{name}](public-scripts.md#{name}))"
            yield title, list(known.values()), [off for script, off in known.items() if script in drawn]


def _spread(errors: Errors) -> tuple[str, ...]:
    worst = max(errors, key=abs)
    large = sum(abs(each) > LARGE for each in errors)
    share = sum(abs(each) <= SMALL for each in errors) / len(errors)
    return str(len(errors)), f"{statistics.median(map(abs, errors)):.1%}", f"{worst:+.1%}", str(large), f"{share:.0%}"


def _section(source: str, rows: Measured) -> Iterator[str]:
    yield f"## {source}\n"
    yield "| Setting | Device | Kind | Published | Simulated | Error | Class | Command, source and reason |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- | --- |"
    for row, each in rows:
        yield line(row, each)
    yield ""


def line(row: Row, measured: Measurement) -> str:
    """Return the line of a row."""
    kind = row["kind"] + (f" ({row['detail']})" if "detail" in row else "")
    off = f"{error(row, measured):+.1%}"
    told = [f"`{row['command']}`", row["where"]]
    if not is_known(row):
        told.append(f"not stated: {', '.join(UNSTATED[name] for name in row['unstated'])}")
    if "reason" in row:
        told.append(row["reason"])
    return _line(
        row["setting"],
        row["device"],
        kind,
        f"{row['published_gib']:.2f} GiB",
        f"{figure(row, measured) / GIB:.2f} GiB",
        off,
        row["class"],
        "<br>".join(told),
    )


def _inexpressible() -> Iterator[str]:
    yield "## Settings that cannot be expressed\n"
    yield "No command comes near the settings of these rows:\n"
    yield "| Source | Setting | Kind | Published | What is missing |"
    yield "| --- | --- | --- | ---: | --- |"
    for row in TABLES["figure"]:
        if "command" not in row:
            cells = (row["source"], row["setting"], row["kind"], f"{row['published_gib']:.2f} GiB", row["reason"])
            yield _line(*cells)
    yield "\nWhat actbench lacks, and how many of the rows above disagree because of it:\n"
    yield "| Missing | Rows | Where |"
    yield "| --- | ---: | --- |"
    for missing in TABLES["missing"]:
        yield _line(missing["option"], str(missing["rows"]), missing["where"])


def _waiting(found: Mapping[Case, MeasuredRecord]) -> Iterator[str]:
    rows = [row for row in runnable() if case_of(row["command"]) not in found]
    if rows:
        yield "\n## Not simulated yet\n"
        yield from (f"- {row['where']}, {row['device']}: {row['setting']}." for row in rows)


def _left_out() -> Iterator[str]:
    yield "\n## Figures that were looked at and left out\n"
    for rejected in TABLES["rejected"]:
        yield f"- {rejected['source']}: {rejected['why']}."
    yield from (f"- {told}." for table in MANY for told in SETTINGS["left_out"](table))
    yield ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    main()
