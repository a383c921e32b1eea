"""What a step holds is on the lines of the script that made it."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch
from mlptraining import ROWS, WEIGHTS, WIDTH, model
from torch import nn
from trainings import RunScript

import actbench
from actbench.model.measured import Measurement
from actbench.simulator.profiles import INSTALLED_TORCH
from actbench.tools.script.answers.tables import script_tables
from actbench.tools.script.steps.lines import Lines


def held_on_lines(found: Measurement) -> Counter[tuple[str, str]]:
    """Return the bytes of each kind on each line at the peak; a line is written as ``train.py:7``."""
    assert found.timeline is not None
    held = Counter[tuple[str, str]]()
    for holder in found.timeline.holders:
        held[holder.kind, (holder.line or "").partition(" ")[0]] += holder.held_bytes
    return held


def test_a_model_that_a_loop_drops_is_gone_from_the_card() -> None:
    with actbench.simulate("rtx-4090"):
        for _ in range(3):
            module = model().cuda()
            optimizer = torch.optim.SGD(module.parameters())
            module(torch.ones(ROWS, WIDTH, device="cuda")).mean().backward()
            del module, optimizer
            gc.collect()
            assert torch.cuda.memory_allocated() < WEIGHTS  # only what cuBLAS holds


def test_losses_and_transforms_are_no_passes_of_models() -> None:
    lines, ran = Lines(Path.cwd()), list[int]()
    lines.ran = lambda: ran.append(1)
    with lines.watching():
        nn.MSELoss()(nn.Linear(2, 2)(nn.Flatten()(torch.ones(1, 2))), torch.ones(1, 2))

    assert len(ran) == 1


def test_a_module_has_no_name_of_one_that_is_gone() -> None:
    lines = Lines(Path.cwd())
    with lines.watching():
        for width in range(1, 50):
            part = nn.Linear(width, width)
            nn.ModuleDict({f"of{width}": part})["of" + str(width)](torch.ones(1, width))
            assert lines.path_of(nn.ReLU()) == "ReLU"
            assert lines.path_of(part) == ""
            assert lines.roots == [part]
            del part


KEEPING = "import os; os.environ['TORCH_CUBLAS_WORKSPACE_CACHE'] = '1'"  # on the empty first line of a script

BRANCHES = """
import torch
from torch import nn

names = [f"branch{first}{second}" for first in "abcdefgh" for second in "abcdefgh"]
model = nn.ModuleDict({name: nn.Linear(128, 128) for name in names})
model = model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 128, device="cuda")
for step in range(9):
    loss = sum(model[name](x).sigmoid().mean() for name in names)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


@pytest.mark.slow
def test_what_many_small_modules_hold_is_on_the_lines_that_made_it(run: RunScript) -> None:
    found = run(KEEPING + BRANCHES)

    assert isinstance(found, Measurement), found
    assert found.timeline is not None
    assert found.peak_parts is not None
    on_lines = held_on_lines(found)
    assert len({holder.module for holder in found.timeline.holders}) < 64
    assert on_lines["weights", "train.py:7"] == found.peak_parts.weights_bytes
    assert on_lines["optimizer", "train.py:13"] == found.peak_parts.optimizer_bytes
    assert on_lines["gradients", "train.py:12"] == found.peak_parts.gradients_bytes > 0
    assert on_lines["batch", "train.py:9"] == 512 * 128 * 4
    assert on_lines["saved", "train.py:11"] > 0.99 * found.peak_parts.activation_bytes
    by_line = next(table for table in script_tables(found) if "line" in table.title)
    assert by_line.rows[-1]["name"] == "(what no line made)"
    assert by_line.rows[-1]["kinds"] == "temporaries", "the workspaces that stay"


PRODUCTS = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", KEEPING])
def test_a_workspace_that_does_not_stay_is_on_the_line_of_its_product(run: RunScript, before: str) -> None:
    found = run(before + PRODUCTS)

    assert isinstance(found, Measurement), found
    stays = bool(before) or INSTALLED_TORCH < (2, 15)
    held = held_on_lines(found)
    assert held["temporary", "" if stays else "train.py:8"] >= (2 if stays else 1) * 8320 * 1024
    assert held["temporary", "train.py:8" if stays else ""] < 1024 * 1024


TWO_PASSES = """
import torch
from torch import nn

first, second = nn.Linear(512, 512).cuda(), nn.Linear(256, 512).cuda()
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
for step in range(9):
    first(torch.randn(8, 512, device="cuda")).mean().backward()
    second(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


@pytest.mark.slow
def test_gradients_are_on_the_lines_of_their_backward_passes(run: RunScript) -> None:
    found = run(TWO_PASSES)

    assert isinstance(found, Measurement), found
    on_lines = {line: held for (kind, line), held in held_on_lines(found).items() if kind == "gradients"}
    assert on_lines == {"train.py:8": (512 + 1) * 512 * 4, "train.py:9": (256 + 1) * 512 * 4}
