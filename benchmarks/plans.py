"""What plans are worth beside what one can put together by hand: the table in results/plans.

Each model is planned for 90, 70, 50 and 35 % of the peak of its exact step, with exact and with any gradients, once at
a fixed micro-batch and once with it free. Beside each plan stand the fastest stack that does the same with all blocks,
and at a fixed micro-batch the fastest that does one thing with the first or the last k of them. All were simulated
whole, within the limit::

    .venv/bin/python benchmarks/plans.py results/plans                 # all models; about an hour on two cores
    .venv/bin/python benchmarks/plans.py results/plans --model resnet50

Simulations are kept beside the table, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from actbench.cli.printing import progress_shown
from actbench.machine import provenance
from actbench.measuring.failures import failure_of
from actbench.model.data import Data
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.tools.fit.planner import Found, Goal
from actbench.tools.fit.records import ANY, EXACT, Asked, Training
from actbench.tools.fit.simulations import Means, candidates_of, simulations
from actbench.units import format_bytes

_MOST_BY_HAND = 2
"""Stacks by hand that are simulated for a cell, those that should be fastest."""

SHARES = (0.9, 0.7, 0.5, 0.35)
HALF = {"dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b, LoRA": {
        "model": "llama-3.1-8b",
        "scheme": "lora:16",
        "batch_size": 1,
        "sequence_length": 2048,
        "device_profile": "rtx-4090",
        **HALF,
    },
    "llama-3.1-8b": {
        "model": "llama-3.1-8b",
        "batch_size": 1,
        "sequence_length": 2048,
        "device_profile": "h100-80gb",
        **HALF,
    },
    "qwen3-0.6b": {
        "model": "qwen3-0.6b",
        "batch_size": 4,
        "sequence_length": 2048,
        "device_profile": "rtx-4090",
        **HALF,
    },
    "qwen3-4b": {
        "model": "qwen3-4b",
        "batch_size": 1,
        "sequence_length": 8192,
        "device_profile": "h100-80gb",
        **HALF,
    },
    "gemma-3-4b": {
        "model": "gemma-3-4b",
        "batch_size": 1,
        "sequence_length": 2048,
        "device_profile": "a100-80gb",
        **HALF,
    },
    "mixtral-8x7b, QLoRA": {
        "model": "mixtral-8x7b",
        "scheme": "qlora:16",
        "batch_size": 1,
        "sequence_length": 2048,
        "device_profile": "h100-80gb",
        **HALF,
    },
    "resnet50": {"model": "resnet50", "batch_size": 256, "device_profile": "v100-16gb"},
    "vit-large": {"model": "vit_l_16", "batch_size": 64, "device_profile": "a100-80gb", "autocast": "bfloat16"},
    "bert-large-uncased": {
        "model": "bert-large-uncased",
        "batch_size": 64,
        "sequence_length": 512,
        "device_profile": "a100-80gb",
        "autocast": "bfloat16",
    },
    "modernbert-large": {
        "model": "modernbert-large",
        "batch_size": 32,
        "sequence_length": 1024,
        "device_profile": "a100-80gb",
        "autocast": "bfloat16",
    },
    "whisper-large-v3": {
        "model": "whisper-large-v3",
        "batch_size": 8,
        "device_profile": "a100-80gb",
        "autocast": "bfloat16",
    },
}


class Cell(NamedTuple):
    """One goal of the table, and what reaches it."""

    name: str
    share: float
    limit: int
    micro_batch: str
    level: Training
    plan: Found | None
    uniform: Found | None
    some: Found | None


def cells(name: str, case: Case, output: Path) -> Iterator[Cell]:
    """Plan one model, and yield its cells; both micro-batches share their simulations."""
    asked = Asked()
    candidates = candidates_of(case, asked, profiles.get(case.device_profile or ""), None)
    with progress_shown("; the same command goes on from there") as progress:
        means = Means(output, "benchmarks/plans.py", budget_seconds=None, timeout_seconds=900, progress=progress)
        with simulations(name, case, candidates, means) as made:
            # at a fixed micro-batch, and in the types of the model: what is compared is what is done with blocks
            fixed = replace(candidates, computing=(), in_parts=())
            for micro_batch, some in (("fixed", fixed), ("free", replace(candidates, computing=()))):
                planner = made.planner(case, asked, some)
                planner.run()
                peak = planner.outcomes[case].peak_bytes  # type: ignore[union-attr]
                goals = [Goal(level, int(share * peak)) for level in (EXACT, ANY) for share in SHARES]
                planner.pursue([*goals, *(replace(goal, uniform=True) for goal in goals)])
                found = [(goal, planner.fastest(goal)) for goal in goals]  # before what is put together by hand
                for goal, plan in found:
                    uniform = planner.fastest(replace(goal, uniform=True))
                    hand = planner.space.of_some(goal.level, goal.limit) if some is fixed else []
                    best = planner.tried(hand[:_MOST_BY_HAND], goal.limit)  # what counts is the whole simulation
                    yield Cell(name, goal.limit / peak, goal.limit, micro_batch, goal.level, plan, uniform, best)


def row_of(cell: Cell) -> dict[str, Any]:
    """Return a row of the table."""

    def told(found: Found | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "scheme": found.case.scheme,
            "optimizer": found.case.optimizer,
            "seconds": found.seconds,
            "peak_bytes": found.measured.peak_bytes,
            "need_bytes": found.need,
            "predicted_peak_bytes": _known(found.plan.peak),
            "predicted_seconds": _known(found.plan.seconds),
        }

    return {
        "model": cell.name,
        "share": round(cell.share, 2),
        "limit_bytes": cell.limit,
        "micro_batch": cell.micro_batch,
        "gradients": "exact" if cell.level == EXACT else "any",
        "plan": told(cell.plan),
        "uniform": told(cell.uniform),
        "k_of_n": told(cell.some),
    }


def _known(figure: float) -> float | None:
    return None if math.isnan(figure) else figure


def gain(row: Mapping[str, Any], beside: str) -> float | None:
    """Return the share of another stack's time that a plan saves."""
    return 1 - row["plan"]["seconds"] / row[beside]["seconds"] if row["plan"] and row[beside] else None


_ABOUT = (
    "Made by `benchmarks/plans.py results/plans`. Budgets are shares of the exact step's peak; time is estimated, each "
    "row was simulated whole within its budget, and reserved bytes count. *k of n* is the faster of two stacks that do "
    "one thing with some of the blocks, at a fixed micro-batch; of all such stacks these two should be the fastest."
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, and below it what it comes to."""
    lines = [
        *("# What plans are worth", "", _ABOUT, ""),
        "| Model | Budget | Micro-batch | Gradients | Plan | Need | Step (est.) | Uniform | Saved | k of n | Saved |",
        "| --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        plan = row["plan"]
        told = ["none fits", "", ""]
        if plan:
            told = [f"`{plan['scheme']}`", format_bytes(plan["need_bytes"]), f"{1000 * plan['seconds']:.1f} ms"]
        beside = []
        for name in ("uniform", "k_of_n"):
            saved = gain(row, name)
            nothing = "none fits" if row["micro_batch"] == "fixed" or name == "uniform" else ""  # no stack by hand
            beside += [f"{1000 * row[name]['seconds']:.1f} ms" if row[name] else nothing]
            beside += ["" if saved is None else f"{100 * saved:.1f} %"]
        head = [row["model"], f"{100 * row['share']:.0f} %", row["micro_batch"], row["gradients"]]
        lines.append("| " + " | ".join([*head, *told, *beside]) + " |")
    return "\n".join([*lines, "", *summary(rows), ""])


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield sentences on how often plans are faster, and how well the sums of costs predict them."""
    for micro_batch in ("fixed", "free"):
        alike = [row for row in rows if row["micro_batch"] == micro_batch and row["plan"]]
        found = [saved for row in alike if (saved := gain(row, "uniform")) is not None]
        if found:
            yield (
                f"- Micro-batch {micro_batch}: plans are faster than the best uniform stack in {_more(found)} of "
                f"{len(found)} cells, slower in {_less(found)}; {_percent(statistics.median(found))} in the median, "
                f"{_percent(max(found))} at most. In {len(alike) - len(found)} more cells no uniform stack fits."
            )
    hand = [saved for row in rows if (saved := gain(row, "k_of_n")) is not None]
    if hand:
        yield f"- Beside the best k of n: faster in {_more(hand)} of {len(hand)} cells, slower in {_less(hand)}."
    plans = [row["plan"] for row in rows if row["plan"] and row["plan"]["predicted_peak_bytes"]]
    if plans:
        peaks = [abs(plan["predicted_peak_bytes"] / plan["peak_bytes"] - 1) for plan in plans]
        times = [abs(plan["predicted_seconds"] / plan["seconds"] - 1) for plan in plans]
        yield (
            f"- The sums of costs are off the whole simulation by {_percent(statistics.median(peaks))} of the peak in "
            f"the median and {_percent(max(peaks))} at most, and by {_percent(statistics.median(times))} and "
            f"{_percent(max(times))} of the time."
        )
    over = sum(row["plan"]["need_bytes"] > row["limit_bytes"] for row in rows if row["plan"])
    yield f"- Plans over their limit, reserved bytes counted: {over} of {len(rows)} cells."


_ALIKE = 1e-4  # share of a step's time; less is no difference


def _more(saved: Sequence[float]) -> int:
    return sum(each > _ALIKE for each in saved)


def _less(saved: Sequence[float]) -> int:
    return sum(each < -_ALIKE for each in saved)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def main() -> int:
    """Plan the models that were asked for, and write the table of all that were planned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", action="append", choices=MODELS, metavar="NAME", help="one of MODELS; repeat")
    asked = parser.parse_args()
    path = asked.output / "plans.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in asked.model or MODELS:
        start = time.monotonic()
        case = Case(**{"meter": "simulated", "gradient_quality": False, **MODELS[name]})
        try:
            new = [row_of(cell) for cell in cells(name, case, asked.output)]
        except Exception as error:
            print(f"{name}: {failure_of(error).message}", file=sys.stderr)
            continue
        known = [row for row in known if row["model"] != name] + new
        known.sort(key=lambda row: list(MODELS).index(row["model"]))
        asked.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**_origin(), "rows": known}, indent=1) + "\n")
        (asked.output / "plans.md").write_text(markdown(known))
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(markdown(known))
    return 0


def _origin() -> dict[str, Any]:
    told = provenance("benchmarks/plans.py")
    return {key: value.model_dump(mode="json") if isinstance(value, Data) else value for key, value in told.items()}


if __name__ == "__main__":
    sys.exit(main())
