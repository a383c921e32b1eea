"""How many simulations `actbench fit` needs, and how long it computes: the table in results/simulations.

Each fit is made anew, with both frontiers and without a budget. Limits are those of results/fit, and for the Llama with
LoRA 50 % of its exact step's peak, as in results/plans; for the script about 60 % of it. Over several cards the limit
is a card's, and the answer that of ``actbench fit --processes``::

    .venv/bin/python benchmarks/simulations.py results/simulations                    # all models
    .venv/bin/python benchmarks/simulations.py results/simulations --model resnet50
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from kept_rows import keep

from actbench.cli.printing import progress_shown
from actbench.machine import machine
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.run.executor import COMPILER
from actbench.run.processes import ForkServer
from actbench.tools.fit import scripts

if TYPE_CHECKING:
    from actbench.tools.fit.records import PlannedStep
    from actbench.tools.fit.simulations import Means

MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {
        "model": "resnet50",
        "batch_size": 256,
        "device_profile": "v100-16gb",
        "memory_limit_bytes": 16932908564,
    },
    "roberta-base": {
        "model": "roberta-base",
        "batch_size": 128,
        "device_profile": "rtx-4060",
        "memory_limit_bytes": 8289286881,
    },
    "llama-3.1-8b, LoRA": {
        "model": "llama-3.1-8b",
        "scheme": "lora:16",
        "batch_size": 1,
        "sequence_length": 2048,
        "dtype": "bfloat16",
        "device_profile": "rtx-4090",
        "memory_limit_bytes": 19550344192,
    },
    "llama-3.1-8b, 8 cards": {
        "model": "llama-3.1-8b",
        "batch_size": 1,
        "sequence_length": 2048,
        "dtype": "bfloat16",
        "device_profile": "rtx-4090",
    },
    "examples/train.py": {
        "model": "examples/train.py",
        "batch_size": 1,
        "script": Script(target="examples/train.py"),
        "device_profile": "rtx-3060-12gb",
        "memory_limit_bytes": 6442450944,
    },
}

PROCESSES = {"llama-3.1-8b, 8 cards": 8}
"""Models that are shared out over so many processes, each with a card."""


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def row_of(name: str) -> dict[str, Any]:
    """Fit one model as the command does, in a process that did nothing before, and return its row."""
    case = Case(meter="simulated", gradient_quality=False, **MODELS[name])
    with ForkServer(scripts.bench_of(case), (COMPILER,)) as server, progress_shown("") as progress:
        from actbench.run.local import ThisMachine
        from actbench.tools.fit.simulations import Means

        machines = ThisMachine(server=server)
        means = Means(None, "benchmarks/simulations.py", budget_seconds=None, progress=progress, machines=machines)
        found = _on_one_card(case, means) if name not in PROCESSES else _over(PROCESSES[name], case, means)
    return {
        "model": name,
        **found,
        "processor_seconds": round(_processor_seconds(), 1),
        "seconds": round(time.time() - psutil.Process().create_time(), 1),  # type: ignore[no-untyped-call]
        "cores": machine().cores,
    }


def _on_one_card(case: Case, means: Means) -> dict[str, Any]:
    from actbench.tools.fit.answer import numbered
    from actbench.tools.fit.fit import find
    from actbench.tools.fit.records import Asked

    found = find(case, Asked(), means)
    return {
        "whole": found.whole,
        "copies": found.copies,
        "refused": len(found.refused),
        "joined": sum(each.record.joined for each in found.tried),
        "frontier": [len(found.frontier(exact=exact)) for exact in (True, False)],
        "error": found.error,
        "plans": [_plan(each) | {"limit_bytes": found.limit_bytes} for each in numbered(found)],
    }


def _over(processes: int, case: Case, means: Means) -> dict[str, Any]:
    from actbench.tools.fit.questions import shared_out
    from actbench.tools.fit.records import Asked

    found = shared_out(case, [processes], Asked(), means)
    return {
        "whole": found.made.whole,
        "copies": found.made.copies,
        "refused": len(found.refused),
        "joined": 0,
        "frontier": [],
        "error": None,
        "plans": [_plan(each.step) | {"limit_bytes": found.case.memory_limit_bytes} for each in found.rows],
    }


def _plan(step: PlannedStep) -> dict[str, Any]:
    return {
        "plan": step.name,
        "need_bytes": step.need_bytes,
        "seconds": step.seconds,
        "slowdown": step.slowdown,
        "joined": step.record.joined,
    }


_ABOUT = (
    "Made by `benchmarks/simulations.py results/simulations`: fits with no stored results, no budget. *Whole* counts "
    "steps of the whole model, *copies* those of copies with fewer blocks; a scheme that is refused before its step "
    "counts as neither. Frontiers are those with exact and with any gradients. *Off* is the most that a joined peak is "
    "off where the plan is simulated whole, too. *Processor* is the time of all processes, *clock* that of the command "
    "on so many cores, from its start; both have all imports."
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    lines = [
        *("# Simulations of fits", "", _ABOUT, ""),
        "| Model | Whole | Copies | Plans joined | Points of frontiers | Off | Processor | Clock | Cores |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        off = "" if row["error"] is None else f"{100 * row['error']:.2f} %"
        points = " + ".join(map(str, row["frontier"]))
        cells = [row["model"], row["whole"], row["copies"], row["joined"], points, off]
        cells += [f"{row['processor_seconds']:.0f} s", f"{row['seconds']:.0f} s", row["cores"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Fit the models, and write what was counted after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, action="append")
    asked = parser.parse_args()
    first, *others = asked.model or MODELS
    keep(row_of(first), asked.folder, "simulations", MODELS, markdown)
    for name in others:
        subprocess.run([sys.executable, __file__, str(asked.folder), "--model", name], check=True)


if __name__ == "__main__":
    main()
