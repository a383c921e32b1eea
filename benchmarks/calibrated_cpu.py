"""How far estimated times are off on this machine's processor, by a profile that ``actbench calibrate`` makes.

The rows of three recipes are run on the processor and estimated by the profile. They run on one thread, and the
processor's time is taken, which other programs disturb less than the clock of the wall; the steps of a model's rows take
turns. Prints docs/calibrated-time.md::

    python benchmarks/calibrated_cpu.py > docs/calibrated-time.md
    python benchmarks/calibrated_cpu.py --profile mine.toml --only tiny-llama --schemes exact,smaq --rounds 3
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

from actbench.errors import ActbenchError
from actbench.experiments.recipes.recipe import Recipe
from actbench.measuring.bench import Session, measure
from actbench.measuring.calibration import calibrate
from actbench.measuring.calibration.profile import toml
from actbench.results.machine import machine
from actbench.results.records import Case
from actbench.results.tables.values import write

RECIPES = ("quickstart", "resnet50", "agreement")
SMALLER = {"roberta-base": 4, "resnet50": 4}
"""Batches of the rows that their recipes only simulate; the recipes' own would take minutes a step."""

_HEAD = """# Times estimated on this machine's processor, beside measured ones

`python benchmarks/calibrated_cpu.py` prints this page: {machine}, one thread, torch {torch}. The profile is what
`actbench calibrate` measured there just before. Measured: the median of {rounds} steps, in seconds of the
processor, of which the rows of a model took turns; other programs ran beside them. [time.md](time.md) says how
times are estimated.
"""


class Row(NamedTuple):
    """A case with the seconds of its step."""

    case: Case
    measured: float
    spread: float
    estimated: float

    @property
    def off(self) -> float:
        """By how much the estimate is off, as a share of what was measured."""
        return self.estimated / self.measured - 1


def main() -> None:
    """Calibrate, measure, estimate, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="a calibrated profile (default: calibrate now)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each row")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--schemes", default="", help="only these, with , between them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        profile = asked.profile or _calibrated(Path(folder) / "cpu.toml")
        print(_HEAD.format(machine=machine().processor, torch=torch.__version__, rounds=asked.rounds))
        print("| Model | Batch | Scheme | Measured | Spread | Estimated | Off by |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
        rows = []
        for model, cases in grouped(asked.only, asked.schemes.split(",") if asked.schemes else []).items():
            _say(f"{model}: {len(cases)} rows")
            for row in compare(cases, profile, asked.rounds):
                rows.append(row)
                print(line(row), flush=True)
    print(f"\n{summary(rows)}")


def _calibrated(path: Path) -> Path:
    found = calibrate("cpu", clock=time.process_time, budget_seconds=600, progress=_say)
    path.write_text(toml(found.profile))
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def grouped(only: str, schemes: Sequence[str]) -> dict[str, list[Case]]:
    """Return the cases of the recipes by model, each once, as they are measured on the processor."""
    found: dict[str, dict[str, Case]] = defaultdict(dict)
    for name in RECIPES:
        for case in (planned.case for planned in Recipe.load(name).cases()):
            if only in case.model and (not schemes or case.scheme in schemes):
                changed = {
                    "meter": "cpu",
                    "device_profile": None,
                    "gradient_quality": False,
                    "find_largest_batch": False,
                    "batch_size": SMALLER.get(case.model, case.batch_size),
                }
                found[case.model][case.scheme] = case.model_copy(update=changed)
    return {model: list(cases.values()) for model, cases in found.items()}


def compare(cases: Sequence[Case], profile: Path, rounds: int) -> list[Row]:
    """Return each case with its measured and its estimated seconds; what cannot be run here is left out."""
    running = []
    for case in cases:
        try:
            session = Session(case)
            step = session._new_step(case.batch_size)
            step()
            step()
            running.append((case, step))
        except ActbenchError as error:
            _say(f"left out: {case.name}: {error}")
    taken: list[list[float]] = [[] for _ in running]
    for _ in range(rounds):
        for seconds, (_, step) in zip(taken, running, strict=True):
            seconds.append(_timed(step))
    running = [(case, None) for case, _ in running]  # frees the models
    gc.collect()
    return [
        Row(case, statistics.median(seconds), max(seconds) / min(seconds) - 1, _estimate(case, profile))
        for seconds, (case, _) in zip(taken, running, strict=True)
    ]


def _timed(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _estimate(case: Case, profile: Path) -> float:
    simulated = case.model_copy(update={"meter": "simulated", "device_profile": str(profile)})
    estimated = measure(simulated).estimated
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
        write(row.spread, "share"),
        write(row.estimated, "seconds"),
        write(row.off, "change"),
    )
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> str:
    """Return the errors by model and of all."""
    lines = []
    for model in (*dict.fromkeys(row.case.model for row in rows), "all"):
        off = [abs(row.off) for row in rows if model in (row.case.model, "all")]
        beyond = sum(each > 0.3 for each in off)
        lines.append(
            f"- {model}: {len(off)} rows, off by {100 * statistics.mean(off):.1f} % in the mean, "
            f"{100 * max(off):.1f} % at worst, {beyond} by more than 30 %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
