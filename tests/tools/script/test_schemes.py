"""Every scheme that a script can take runs in one on a simulated card, or says why not: none crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlptraining import model
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainings import RunScript

import actbench
from actbench import scheme as schemes
from actbench.model.measured import Measurement
from actbench.tools.script.experiment import APPLIED
from actbench.tools.script.schemes import refused
from actbench.tools.script.suggestions import suggestions

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


def test_schemes_are_refused_as_when_they_are_applied() -> None:
    """The models stay as they are: each scheme is applied in a process of its own."""
    module, other = model(), model()
    both = [torch.optim.AdamW(module.parameters()), torch.optim.SGD(other.parameters())]
    asked = ("checkpoint", "fewbit:3", "lora:16", "offload")

    def no(roots: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> tuple[str, ...]:
        return refused(asked, roots, optimizers, are_fake=True)

    assert no([module], both[:1]) == ("checkpoint",), "it has no blocks"
    assert no([module], both[1:]) == asked, "no optimizer trains it"
    assert no([], both) == asked
    shared = [torch.optim.SGD(module[place].parameters()) for place in (0, 2)]  # type: ignore[index]
    assert no([module], shared) == ("checkpoint", "lora:16"), "one optimizer has to train all that is frozen"
    assert type(module[1]) is nn.GELU  # type: ignore[index]
    assert refused(asked, [], both, are_fake=False) == asked


@pytest.mark.parametrize(("reentrant", "again"), [(None, False), (True, True), (False, True)])
def test_modules_that_are_recomputed_are_noticed(reentrant: bool | None, again: bool) -> None:
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        optimizer = torch.optim.SGD(module.parameters())
        while True:
            x = torch.randn(64, 512, device="cuda", requires_grad=True)
            y = module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert card.lines.runs_again == again


IN_PARTS = """
import torch
layer = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.Adam(layer.parameters())
x = torch.rand(2**18, 4096, device="cuda")
while True:
    torch.relu(x @ layer.weight.T + layer.bias).exp().sigmoid().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BLOCKS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, x):
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = {call}
        return x

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(2**16, 512, device="cuda", requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_no_scheme_is_advised_that_the_next_command_refuses_or_that_is_on(run: RunScript) -> None:
    def advised(text: str) -> set[str]:
        found = run(text)
        assert isinstance(found, Measurement), found
        assert found.peak_parts is not None
        assert found.peak_parts.activation_bytes > 0.1 * found.peak_bytes
        unasked = found.model_copy(update={"built": None, "memory_limit_bytes": found.peak_bytes})
        assert {"checkpoint", "offload"} <= {each.scheme for each in suggestions(unasked, most=None)}
        tight = found.model_copy(update={"memory_limit_bytes": found.peak_bytes})
        return {each.scheme for each in suggestions(tight, most=None)}

    assert advised(IN_PARTS) == set()
    plain = advised(BLOCKS.format(call="layer(x)"))
    assert {"checkpoint", "offload", "fewbit:3"} <= plain
    again = advised(BLOCKS.format(call="checkpoint(layer, x, use_reentrant=False)"))
    assert "checkpoint" not in again
    assert "offload" in again
