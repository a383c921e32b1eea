"""Whether the verdict over a whole run is true: scripts that train, and then run out of memory.

Each script of tests/tools/script/wholeruns.py runs whole on the CPU, which gives its true peak, and simulated with the
CPU's profile: whole, and by two equal steps alone. A verdict is wrong where the peak that is simulated and the true one
are on different sides of a limit. Limits just below and above each true peak are tried::

    .venv/bin/python benchmarks/whole_runs.py results/run/whole.md
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tools" / "script"))

from wholeruns import scripts  # noqa: E402 - beside the tests that hold these figures

from actbench.machine import provenance  # noqa: E402
from actbench.model.measured import Measurement  # noqa: E402
from actbench.model.meters import MeterName  # noqa: E402
from actbench.model.records import Case  # noqa: E402
from actbench.model.scripts import Script  # noqa: E402
from actbench.tools.script.bench import Session  # noqa: E402

MARGINS = (0.01, 0.05, 0.25)
"""How far from the true peak a limit is."""


class Row(NamedTuple):
    """The peaks of a script in bytes: for real, simulated whole, and of its simulated steps alone."""

    name: str
    kind: str
    real: int
    whole: int
    steps: int
    grows: bool

    def wrong(self, found: int, margin: float) -> str | None:
        """Return what a verdict by ``found`` says wrongly where the limit is by ``margin`` below or above the peak."""
        if found <= (1 - margin) * self.real:
            return "fits"
        return "does not fit" if found > (1 + margin) * self.real else None


def measured(file: Path, meter: MeterName, *, whole: bool) -> Measurement:
    """Run a script in a process that is forked from this one."""
    script, profile = Script(target=str(file), whole=whole), "cpu" if meter == "simulated" else None
    case = Case(model=file.name, batch_size=1, meter=meter, device_profile=profile, script=script)
    return Session(case).memory()


def rows(folder: Path) -> list[Row]:
    """Run all scripts."""
    found = []
    for name, kind, text in scripts():
        file = folder / "train.py"
        file.write_text(text.replace("FILE", str(folder / "state.pt")))
        real, whole, steps = (
            measured(file, "cpu", whole=True),
            measured(file, "simulated", whole=True),
            measured(file, "simulated", whole=False),
        )
        most = [max(each.peak_bytes for each in one.events) for one in (real, whole)]
        found.append(Row(name, kind, *most, steps.peak_bytes, whole.growth is not None))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def page(found: Sequence[Row], versions: Any) -> str:
    """Return the page."""
    errors = [abs(row.whole / row.real - 1) for row in found]
    return "\n".join(
        [
            "# Whole runs against the truth",
            "",
            f"Made by `benchmarks/whole_runs.py` with torch {versions.torch}.",
            "",
            f"{len(found)} scripts of tests/tools/script/wholeruns.py, as people write them who then ask why memory",
            "ran out: their peaks in bytes, run whole on a CPU (`actbench run --meter cpu --whole`), simulated whole,",
            "and simulated until two steps are equal, as `actbench run` does without `--whole`. *Grows*: the answer",
            "begins with what each step leaves.",
            "",
            f"The error of whole runs is {statistics.median(errors):.2%} in the median, {max(errors):.2%} at most.",
            "",
            "How many verdicts are wrong where the limit is so much below or above the true peak:",
            "",
            '| limit | whole: false "fits" | whole: false "does not fit" | steps alone: false "fits" |',
            "| --- | ---: | ---: | ---: |",
            *(_tally(found, margin) for margin in MARGINS),
            "",
            "| script | of | real | whole | difference | steps alone | grows |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- |",
            *(
                f"| {row.name} | {row.kind} | {row.real:,} | {row.whole:,} | {row.whole / row.real - 1:+.2%} "
                f"| {row.steps / row.real - 1:+.0%} | {'yes' if row.grows else ''} |"
                for row in found
            ),
            "",
        ]
    )


def _tally(found: Sequence[Row], margin: float) -> str:
    whole = [row.wrong(row.whole, margin) for row in found]
    steps = [row.wrong(row.steps, margin) for row in found if not row.grows]  # what grows is told at once
    return (
        f"| {margin:.0%} | {whole.count('fits')} | {whole.count('does not fit')} "
        f"| {steps.count('fits')} of {len(steps)} that do not grow |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args(arguments).output.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"  # each thread of an operator has buffers of its own
    said = provenance("benchmarks/whole_runs.py")
    with tempfile.TemporaryDirectory() as folder:
        found = rows(Path(folder))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(found, said["versions"]), encoding="utf-8")


if __name__ == "__main__":
    main()
