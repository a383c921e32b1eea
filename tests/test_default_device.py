"""A default device that torch was given is for what a user makes: seeds, counters and what CPU kernels write stay."""

from __future__ import annotations

import pytest

from actbench.ops import noise

MODEL = """
import torch
from torch import nn
import actbench
from actbench import optim

model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)), torch.randn(8, 64)
"""
TRAINED = """
model = actbench.convert(model, {!r})
with torch.device("meta"):
    model(x).square().sum().backward()
assert all(parameter.grad.is_cpu for parameter in model.parameters())
"""
STEPPED = """
for encoding in ("smaq", "int:6", "smaq,block=512", None):
    optimizer = optim.AdamW(model.parameters(), encoding=encoding)
    model(x).square().sum().backward()
    with torch.device("meta"):
        optimizer.step()
    assert all(value.is_cpu for state in optimizer.state.values() for value in state.values())
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(STEPPED, id="step"),
        *(pytest.param(TRAINED.format(spec), id=spec) for spec in ("actnn:L3", "fewbit")),
    ],
)
def test_it_moves_nothing_of_ours(code: str) -> None:
    """A kernel that is given memory of another device ends this process, which pytest tells too."""
    noise._check_layout.cache_clear()  # as in a process that has drawn nothing yet
    exec(MODEL + code, {})
