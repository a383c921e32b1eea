"""How far estimated times are off on this machine's processor, by a profile that ``actbench calibrate`` makes.

Rows of three recipes are run on the processor and estimated by the profile: the exact model of each, and every scheme
on one of the models that take seconds, in turn, or on all of them with ``--all``. They run on one thread, and the
processor's time is taken. Other programs slow that down, too, so a yardstick (products, additions, small operators)
runs beside every step and all through the calibration: how much longer it took is told, and what an estimate is off by
if what was measured is divided by it. Prints docs/calibrated-time.md::

    .venv/bin/python benchmarks/calibrated_cpu.py --all > docs/calibrated-time.md
    .venv/bin/python benchmarks/calibrated_cpu.py --profile mine.toml --only tiny-llama --schemes "exact;smaq"
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ActbenchError
from actbench.machine import machine
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.report.tables.values import write
from actbench.run.recipes.recipe import Recipe
from actbench.scheme.setup import TrainStep
from actbench.tools.calibrate.calibrate import calibrate
from actbench.tools.calibrate.profile import toml

RECIPES = ("agreement", "quickstart", "resnet50")
SMALLER = {"roberta-base": 4, "resnet50": 4}
"""Batches of the rows that their recipes only simulate; the recipes' own would take minutes a step."""

FEW = {"roberta-base": ("exact", "checkpoint", "fewbit:3+randomized:0.2")}
"""Schemes of models that are too large for all of theirs to be held at a time."""
TURNS = "agreement"
"""The recipe of which each scheme is run on one model, by turns."""

_HEAD = """# Times estimated for this machine's processor, and measured ones

`.venv/bin/python benchmarks/calibrated_cpu.py{flag}` prints this page: {machine}, one thread, torch {torch}. The
profile was made by `actbench calibrate` just before. *Measured* is the median of {rounds} steps, in seconds of
processor time; the rows of a model took turns. *Off by* compares the estimate with it. *Slowed* says how much longer
a yardstick took during these steps than during the calibration, and *by the yardstick* compares the estimate with the
measured time divided by that: on a machine that runs other programs, this is nearer to the truth. [time.md](time.md)
says how times are estimated, and [a decision](decisions/0022-calibrated-cpu.md) which rows are off and why.
"""


class Row(NamedTuple):
    """A case with the seconds of its step."""

    case: Case
    measured: float
    slowed: float
    estimated: float

    @property
    def off(self) -> float:
        """By how much the estimate is off, as a share of what was measured."""
        return self.estimated / self.measured - 1

    @property
    def off_by_yardstick(self) -> float:
        """The same, if what was measured is divided by how much longer the yardstick took."""
        return self.estimated * self.slowed / self.measured - 1


def main() -> None:
    """Calibrate, measure, estimate, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="keep the profile here, or take it from there")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each row")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--schemes", default="", help="only these, with ; between them")
    parser.add_argument("--all", action="store_true", help="every scheme on every model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        profile = asked.profile or Path(folder) / "cpu.toml"
        usual = calibrated(profile)
        flag = " --all" if asked.all else ""
        print(_HEAD.format(flag=flag, machine=machine().processor, torch=torch.__version__, rounds=asked.rounds))
        print("| Model | Batch | Scheme | Measured | Estimated | Off by | Slowed | By the yardstick |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
        rows = []
        wanted = asked.schemes.split(";") if asked.schemes else []
        for model, cases in grouped(asked.only, wanted, every=asked.all).items():
            _say(f"{model}: {len(cases)} rows")
            for row in compare(cases, profile, asked.rounds, usual):
                rows.append(row)
                print(line(row), flush=True)
    print(f"\n{summary(rows)}")


def calibrated(path: Path) -> float:
    """Make a profile unless it is there, and return the seconds of the yardstick, which stand beside it."""
    beside = path.with_suffix(".yardstick")
    if not path.exists():
        measure_yard = yardstick()
        taken: list[float] = []

        def progress(text: str) -> None:
            _say(text)
            taken.extend(measure_yard() for _ in range(3))

        found, _ = calibrate("cpu", clock=time.process_time, budget_seconds=900, progress=progress)
        path.write_text(toml(found))
        beside.write_text(str(statistics.median(taken)))
    return float(beside.read_text())


def yardstick() -> Callable[[], float]:
    """Return what takes some 10 ms of the processor, and says how long it took."""
    matrix, large, small = torch.randn(384, 384), torch.randn(2**20), torch.randn(64)

    def run() -> None:
        matrix @ matrix
        for _ in range(3):
            large + large
        for _ in range(500):
            small + small

    run()
    return lambda: _timed(run)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def grouped(only: str, chosen: Sequence[str], *, every: bool) -> dict[str, list[Case]]:
    """Return the cases of the recipes by model, each once, as they are measured on the processor."""
    found: dict[str, dict[str, Case]] = defaultdict(dict)
    for name in RECIPES:
        planned = [each.case for each in Recipe.load(name).cases()]
        for case in planned if every or name != TURNS else _by_turns(planned):
            if only in case.model and case.scheme in (chosen or FEW.get(case.model, (case.scheme,))):
                changed = {
                    "meter": "cpu",
                    "device_profile": None,
                    "batch_size": SMALLER.get(case.model, case.batch_size),
                }
                found[case.model][case.scheme] = case.model_copy(update=changed)
    return {model: list(cases.values()) for model, cases in found.items()}


def _by_turns(cases: Sequence[Case]) -> list[Case]:
    """Return the exact cases, and each scheme on one of its models."""
    models: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.meter == "cpu":
            models[case.scheme].append(case)
    chosen = [each[turn % len(each)] for turn, (scheme, each) in enumerate(models.items()) if scheme != "exact"]
    return models["exact"] + chosen


def compare(cases: Sequence[Case], profile: Path, rounds: int, usual: float) -> list[Row]:
    """Return each case with its measured and its estimated seconds; what cannot be run here is left out."""
    running = []
    for case in cases:
        try:
            step = _step(case)
            step()
            step()
            running.append((case, step))
        except ActbenchError as error:
            _say(f"left out: {case.name}: {error}")
    measure_yard = yardstick()
    taken: list[list[tuple[float, float]]] = [[] for _ in running]
    for _ in range(rounds):
        for found, (_, step) in zip(taken, running, strict=True):
            before, seconds = measure_yard(), _timed(step)
            found.append((seconds, (before + measure_yard()) / 2))
    planned = [case for case, _ in running]
    del running, step  # the models
    gc.collect()
    return [_row(case, found, _estimate(case, profile), usual) for case, found in zip(planned, taken, strict=True)]


def _row(case: Case, taken: Sequence[tuple[float, float]], estimated: float, usual: float) -> Row:
    seconds, yards = zip(*taken, strict=True)
    return Row(case, statistics.median(seconds), statistics.median(yards) / usual, estimated)


def _step(case: Case) -> TrainStep:
    """Return the training step of a case."""
    workload = workloads.load_workload(case)
    setup = schemes.build(case.scheme).apply(workload.setup(materialize=True, seed=0))
    return TrainStep(setup, workload.batch(case.batch_size, seed=0))


def _timed(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _estimate(case: Case, profile: Path) -> float:
    changed = {"meter": "simulated", "device_profile": str(profile), "find_largest_batch": False}
    estimated = measure(case.model_copy(update=changed)).estimated
    assert estimated is not None
    return estimated.step_seconds


def line(row: Row) -> str:
    """Return the row of the table."""
    case = row.case
    cells = (
        case.model,
        str(case.batch_size),
        f"`{case.scheme}`",
        write(row.measured, "seconds"),
        write(row.estimated, "seconds"),
        write(row.off, "change"),
        write(row.slowed, "ratio"),
        write(row.off_by_yardstick, "change"),
    )
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> str:
    """Return the errors by model and of all."""
    lines = []
    for model in (*dict.fromkeys(row.case.model for row in rows), "all"):
        found = [row for row in rows if model in (row.case.model, "all")]
        plain, divided = [row.off for row in found], [row.off_by_yardstick for row in found]
        lines.append(f"- {model}: {len(found)} rows, off by {_told(plain)}; by the yardstick {_told(divided)}")
    return "\n".join(lines)


def _told(off: Sequence[float]) -> str:
    errors = [abs(each) for each in off]
    mean, worst, beyond = statistics.mean(errors), max(errors), sum(each > 0.3 for each in errors)
    return f"{100 * mean:.1f} % in the mean, {100 * worst:.1f} % at worst, {beyond} beyond 30 %"


if __name__ == "__main__":
    main()
