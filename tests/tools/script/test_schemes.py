"""Every scheme that a script can take runs in one on a simulated card, or says why not: none crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actbench import scheme as schemes
from actbench.tools.script.experiment import APPLIED

EXAMPLES = {"encode": "encode:int:6", "fewbit": "fewbit:3", "gact": "gact:L1", "randomized": "randomized:0.5"}
SCRIPT = """
import torch
from torch import nn

layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16 * 16, 64)]
layers += [nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    x, y = torch.randn(32, 3, 16, 16, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DRAWING = ("randomized:0.5", "wtacrs", "prac")
"""Schemes that draw numbers for the card from seeds, which are in host memory."""
OTHERS = tuple(
    spec
    for name in schemes.alone()
    if name != "exact" and set(schemes.lookup(name).model_construct().changes) <= APPLIED
    if (spec := EXAMPLES.get(name, name)) not in DRAWING
)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(DRAWING, marks=pytest.mark.slow, id="drawing"),
        pytest.param(OTHERS, marks=pytest.mark.exhaustive, id="others"),  # takes minutes
    ],
)
def test_a_script_runs_under_each_scheme_or_it_is_refused(specs: tuple[str, ...], tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    words = ["run", "--device-profile", "rtx-4060", "--quiet", "--export-json", str(file)]
    words += [word for spec in specs for word in ("--scheme", spec)]
    subprocess.run([sys.executable, "-m", "actbench", *words, str(script)], capture_output=True, check=False)

    found = {row["case"]["scheme"]: row["outcome"] for row in json.loads(file.read_text())}
    assert len(found) == 1 + len(specs)
    assert {spec: why["message"] for spec, why in found.items() if why.get("reason") == "crash"} == {}
    assert specs is not DRAWING or {why["kind"] for why in found.values()} == {"measured"}
