"""How far steps that are joined from traces are off: the table in results/joins.

Of each model, or each script, the exact step is simulated, and one step with each action on all blocks. Random plans
for its blocks are joined from these traces, and each is simulated whole, too::

    .venv/bin/python benchmarks/joins.py results/joins                    # all models, 50 plans each
    .venv/bin/python benchmarks/joins.py results/joins --model resnet50 --plans 10
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.simulator import profiles
from actbench.simulator.join import Joiner
from actbench.simulator.trace import Trace
from actbench.tools.fit.bench import Session
from actbench.tools.fit.join import measured
from actbench.tools.script import planbench

CARD = "a100-80gb"
ACTIONS = ("checkpoint", "gact:L2.2", "offload")
GPT, VIT = (Script(target=file) for file in ("examples/train.py", "tests/tools/script/scripts/vit.py"))
MODELS: dict[str, dict[str, Any]] = {
    "examples/train.py": {"model": GPT.text, "script": GPT, "batch_size": 1},
    "vit.py": {"model": VIT.text, "script": VIT, "batch_size": 1},
    "resnet50": {"model": "resnet50", "batch_size": 256},
    "bert-base": {"model": "bert-base-uncased", "batch_size": 32, "sequence_length": 512},
    "vit_l_16, autocast": {"model": "vit_l_16", "batch_size": 64, "autocast": "bfloat16"},
    "llama-3.2-1b, LoRA": {
        "model": "llama-3.2-1b",
        "batch_size": 1,
        "sequence_length": 2048,
        "dtype": "bfloat16",
        "scheme": "lora:16",
    },
    "t5-small": {"model": "t5-small", "batch_size": 16, "sequence_length": 512},
    "whisper-small": {"model": "whisper-small", "batch_size": 8},
}


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def simulated(exact: Case, scheme: str) -> tuple[Measurement, Trace, float]:
    """Return the measurement of a step with a scheme, its trace, and the processor seconds that it took."""
    began = _processor_seconds()
    parts = [part for part in (exact.scheme, scheme) if part != "exact"]
    case = exact.model_copy(update={"scheme": "+".join(parts) or "exact"})
    found = (Session if case.script is None else planbench.Session)(case).memory()
    assert found.trace is not None
    return found, Trace.unpacked(found.trace), _processor_seconds() - began


def plans(blocks: int, count: int) -> Iterator[list[str]]:
    """Yield plans: one action on the first blocks, one on blocks by chance, several on blocks by chance."""
    chance = random.Random(1)
    for _ in range(count):
        kind, action = chance.choice(("first", "some", "several")), chance.choice(ACTIONS)
        if kind == "first":
            first = chance.randrange(1, blocks)
            yield [action] * first + ["exact"] * (blocks - first)
        elif kind == "some":
            yield [chance.choice((action, "exact")) for _ in range(blocks)]
        else:
            yield [chance.choice((*ACTIONS, "exact")) for _ in range(blocks)]


def compared(name: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan of a model: how far the joined step is off the one that was simulated whole."""
    exact = Case(meter="simulated", device_profile=CARD, gradient_quality=False, **MODELS[name])
    base, trace, _ = simulated(exact, "exact")
    paths, profile = trace.blocks, profiles.get(CARD)

    def spec(plan: Sequence[str]) -> str:
        chosen = {each: [path for path, action in zip(paths, plan, strict=True) if action == each] for each in ACTIONS}
        return "+".join(f"{each},only={'/'.join(found)}" for each, found in chosen.items() if found) or "exact"

    traces: dict[Hashable, Trace] = {action: simulated(exact, spec([action] * len(paths)))[1] for action in ACTIONS}
    joiner = Joiner(trace, traces)
    for plan in plans(len(paths), count):
        began = _processor_seconds()
        joined = measured(base, joiner, plan, profile, profile.step_bytes(None), ())
        seconds = _processor_seconds() - began
        whole, _, whole_seconds = simulated(exact, spec(plan))
        assert joined.estimated is not None
        assert whole.estimated is not None
        yield {
            "model": name,
            "plan": spec(plan),
            "peak_bytes": whole.peak_bytes,
            "peak": joined.peak_bytes / whole.peak_bytes - 1,
            "reserved": (joined.reserved_bytes or 0) / (whole.reserved_bytes or 1) - 1,
            "time": joined.estimated.step_seconds / whole.estimated.step_seconds - 1,
            "host": ((joined.host_bytes or 0) - (whole.host_bytes or 0)) / whole.peak_bytes,
            "joined_seconds": seconds,
            "whole_seconds": whole_seconds,
        }


_ABOUT = (
    "Made by `benchmarks/joins.py results/joins`: random plans for the blocks of a model, or of the one that a script "
    "trains, joined from the traces of "
    f"the exact step and of {', '.join(f'`{each}`' for each in ACTIONS)} on all blocks, and simulated whole, too. A "
    "cell has the median and the worst of how far the joined step is off, without sign. Host memory is compared with "
    "the peak. Seconds are processor time of one plan, those of the join with its allocator's replay and its estimate "
    "of time."
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    lines = [
        *("# Joined steps", "", _ABOUT, ""),
        "| Model | Plans | Peak equal to the byte | Peak | Reserved | Time | Host memory | Join | Simulation |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(row["model"] for row in rows):
        alike = [row for row in rows if row["model"] == name]
        cells = [_percents([abs(row[what]) for row in alike]) for what in ("peak", "reserved", "time", "host")]
        taken = [statistics.median(row[what] for row in alike) for what in ("joined_seconds", "whole_seconds")]
        equal = sum(row["peak"] == 0 for row in alike)
        seconds = [f"{1000 * taken[0]:.0f} ms", f"{taken[1]:.2f} s"]
        lines.append("| " + " | ".join([name, str(len(alike)), str(equal), *cells, *seconds]) + " |")
    return "\n".join([*lines, ""])


def _percents(found: Sequence[float]) -> str:
    return f"{100 * statistics.median(found):.2f} %, {100 * max(found):.2f} %"


def main() -> None:
    """Compare, and write what was found after each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--plans", type=int, default=50)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = given.folder / "joins.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    # scripts run in forks, which have to be made before autograd runs in this process
    for name in sorted(given.model or MODELS, key=lambda name: "script" not in MODELS[name]):
        found = list(compared(name, given.plans))
        rows = [*(row for row in rows if row["model"] != name), *found]
        path.write_text(json.dumps(rows, indent=1) + "\n")
        (given.folder / "joins.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
