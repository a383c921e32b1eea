"""Whether the code that `actbench fit` prints needs what was promised: the table in results/pasted.

Each model is planned for so much of its exact step's peak. The loop of the first plan is pasted below lines that build
the model with transformers or torchvision, as a user would, and the file is run by `actbench run`; the lines for a
script are pasted where they say. No line of the file says what was planned but those that were printed::

    .venv/bin/python benchmarks/pasted.py results/pasted
    .venv/bin/python benchmarks/pasted.py results/pasted --model resnet50
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kept_rows import keep

from actbench.cli.printing import progress_shown
from actbench.model.records import Case
from actbench.model.scripts import Script
from actbench.tools.fit.answer import numbered
from actbench.tools.fit.bench import Session
from actbench.tools.fit.codegen import pieces_of
from actbench.tools.fit.fit import find
from actbench.tools.fit.records import Asked, PlannedStep
from actbench.tools.fit.simulations import Means
from actbench.tools.script import planbench
from actbench.workload import load_workload
from actbench.workload.names import find_preset

SHARE = 0.6
"""Of the exact step's peak, which plans may use."""

OF_SCRIPTS = ("checkpoint", "fewbit:4")
"""Schemes among which scripts are planned, each of which runs the script again."""

TEXT = {"batch_size": 16, "sequence_length": 256}
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "batch_size": 128, "device_profile": "v100-16gb"},
    "vit_b_16": {"model": "vit_b_16", "batch_size": 64, "device_profile": "rtx-3060-12gb"},
    "roberta-base": {"model": "roberta-base", **TEXT, "device_profile": "rtx-4060"},
    "gpt2": {"model": "gpt2", **TEXT, "device_profile": "rtx-4090"},
    "t5-small": {"model": "t5-small", **TEXT, "device_profile": "rtx-4060"},
    "llama-3.2-1b, LoRA": {
        "model": "llama-3.2-1b",
        "scheme": "lora:16",
        "batch_size": 1,
        "sequence_length": 2048,
        "dtype": "bfloat16",
        "device_profile": "rtx-4090",
    },
    "examples/train.py": {"script": "examples/train.py", "device_profile": "rtx-3060-12gb"},
    "vit.py": {"script": "tests/tools/script/scripts/vit.py", "device_profile": "rtx-3060-12gb"},
}


def row_of(name: str) -> dict[str, Any]:
    """Plan a model, paste the code of the first plan, run it, and return the row."""
    settings = dict(MODELS[name])
    script = Script(target=settings.pop("script")) if "script" in settings else None
    given = {"model": script.text, "script": script, "batch_size": 1} if script else {}
    case = Case(meter="simulated", gradient_quality=False, **settings, **given)
    exact = (Session if script is None else planbench.Session)(case).memory()
    limited = case.model_copy(update={"memory_limit_bytes": round(SHARE * exact.peak_bytes)})
    with progress_shown("") as progress:
        schemes = OF_SCRIPTS if script else None
        found = find(limited, Asked(), Means(schemes=schemes, budget_seconds=None, progress=progress))
    plan = numbered(found)[0]
    code = pieces_of([("Plan 1", plan)], 1)[0][1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pasted.py"
        file.write_text(_beside(Path(script.target), code) if script else f"{_head(plan)}\n{code}")
        record = _run(file, plan, Path(folder) / "record.json")
    return {
        "model": name,
        "plan": plan.name,
        "promised_bytes": plan.measurement.peak_bytes,
        "promised_need_bytes": plan.need_bytes,
        "peak_bytes": record["peak_bytes"],
        "need_bytes": max(record["peak_bytes"], record["reserved_bytes"] or 0),
    }


def _head(plan: PlannedStep) -> str:
    """Return the lines above a loop: the model on the card, and batches of the shapes that were planned for."""
    case, built = plan.case, plan.measurement.built
    assert built is not None
    batch = load_workload(case).batch(1, seed=0)
    tensors = {
        name: f"torch.zeros({(case.batch_size, *value.shape[1:])}, dtype={value.dtype}, device='cuda')"
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    made = f"torchvision.models.{case.model}()"
    if preset := find_preset(case.model):
        made = f"transformers.{built.model_class}(transformers.AutoConfig.for_model(**{dict(preset.config)!r}))"
    lines = [
        "import torch, torchvision, transformers",
        f"torch.set_default_dtype(torch.{case.dtype or 'float32'})",
        "with torch.device('cuda'):",
        f"    model = {made}.train()",
        "torch.set_default_dtype(torch.float32)",
        f"batch = {{{', '.join(f'{name!r}: {value}' for name, value in tensors.items())}}}",
        "batches = [batch] * 4",
    ]
    return "\n".join(lines)


def _beside(script: Path, code: str) -> str:
    """Return a script with the lines that were printed for it: some before its optimizer is made, others after."""
    source = script.read_text()
    made = re.search(r"^( *)optimizer = .*$", source, re.MULTILINE)
    assert made is not None, f"{script} makes no optimizer"
    before, _, after = code.partition("# after its optimizer is made")
    lines = [*before.splitlines(), made[0].strip(), *after.splitlines()]
    pasted = "\n".join(f"{made[1]}{line}" for line in lines)
    return source[: made.start()] + pasted + source[made.end() :]


def _run(file: Path, plan: PlannedStep, record: Path) -> Mapping[str, Any]:
    """Run a file on the card that was planned for, within the limit, and return what its step measured."""
    case = plan.case
    words = ["run", "--device-profile", str(case.device_profile), "--memory-limit", f"{case.memory_limit_bytes}B"]
    words += ["--export-json", str(record), str(file)]
    subprocess.run([sys.executable, "-m", "actbench", *words], check=True, stdout=subprocess.DEVNULL)
    outcome: Mapping[str, Any] = json.loads(record.read_text())[0]["outcome"]
    return outcome


_ABOUT = (
    f"Made by `benchmarks/pasted.py results/pasted`: the first plan of `actbench fit` within {SHARE:.0%} of the exact "
    "step's peak, and what `actbench run` reads of a file in which the printed code is pasted below a model that "
    "transformers or torchvision builds, or into a script. *Reserved* is what the allocator takes."
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    lines = [*("# Plans, pasted and run", "", _ABOUT, "")]
    lines += ["| Model | Plan | Promised | Pasted | Off | Reserved off |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        peaks = [f"{row[name] / 2**30:.2f} GiB" for name in ("promised_bytes", "peak_bytes")]
        offs = [row["peak_bytes"] / row["promised_bytes"], row["need_bytes"] / row["promised_need_bytes"]]
        cells = [row["model"], f"`{row['plan']}`", *peaks, *(f"{100 * (off - 1):+.2f} %" for off in offs)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Plan, paste and run, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, action="append")
    asked = parser.parse_args()
    for name in asked.model or MODELS:
        keep(row_of(name), asked.folder, "pasted", MODELS, markdown)


if __name__ == "__main__":
    main()
