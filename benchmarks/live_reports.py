"""Measure what ``run --live`` costs the process of a script: processor time with and without reports, interleaved.

Each run of examples/train.py, on a simulated rtx-4060, is in a process of its own::

    .venv/bin/python benchmarks/live_reports.py [ROUNDS]
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from actbench import livememory
from actbench.model.live import LiveMemory
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.tools.script.bench import Session

ROOT = Path(__file__).parents[1]
SCRIPT, CARD, ROUNDS = "examples/train.py", "rtx-4060", 10


def main() -> None:
    """Print the processor times of each round, and the median of what reports add."""
    os.chdir(ROOT)
    spent(is_live=False)  # reads files for the first time
    shares = []
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS):
        seconds = {is_live: spent(is_live=is_live) for is_live in ((False, True), (True, False))[number % 2]}
        shares.append(seconds[True][0] / seconds[False][0])
        print(f"{seconds[False][0]:.2f} s without, {seconds[True][0]:.2f} s with {seconds[True][1]} reports")
    print(f"median of {len(shares)} rounds: {statistics.median(shares):.3f} times the processor time")


def spent(*, is_live: bool) -> tuple[float, int]:
    """Return the processor seconds of a run, and the number of its reports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile() as reports:
        if (child := os.fork()) == 0:
            _run(reports.fileno(), is_live=is_live)
        os.waitpid(child, 0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        reports.seek(0)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, len(reports.readlines())


def _run(reports: int, *, is_live: bool) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def tell(report: LiveMemory) -> None:
        os.write(reports, report.model_dump_json().encode() + b"\n")

    case = Case(model=SCRIPT, batch_size=1, device_profile=CARD, meter="simulated", script=Script(target=SCRIPT))
    with livememory.report_to(tell if is_live else None):
        Session(case).memory()
    os._exit(0)


if __name__ == "__main__":
    main()
