"""Memory that reference cycles hold after a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.measuring.bench import Session
from actbench.model.records import Case

OWN = """
import torch
from torch import nn

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        {keep}
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * {kept}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(Exp.apply(self.first(x)))

def build():
    model = Model()
    return model, lambda n: {{"x": torch.randn(n, 64)}}, lambda model, batch: model(batch["x"]).square().mean()
"""
CYCLE = {"keep": "ctx.y = y", "kept": "ctx.y"}
SAVED = {"keep": "ctx.save_for_backward(y)", "kept": "ctx.saved_tensors[0]"}


@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_the_peak_is_that_of_a_saved_tensor_and_the_cycle_is_named(tmp_path: Path, meter: str) -> None:
    found = {}
    for name, words in (("cycle", CYCLE), ("saved", SAVED)):
        (tmp_path / f"{name}.py").write_text(OWN.format(**words))
        case = {"model": f"{tmp_path / name}.py:build", "batch_size": 4096, "optimizer": "adamw", "meter": meter}
        found[name] = Session(
            Case.model_validate({**case, "device_profile": "cpu", "gradient_quality": False}), timeline=True
        ).memory()

    cycle, saved = found["cycle"], found["saved"]
    assert cycle.peak_bytes == saved.peak_bytes
    assert cycle.optimizer_bytes == saved.optimizer_bytes
    assert cycle.peak_parts is not None
    assert sum(cycle.peak_parts.model_dump().values()) == cycle.peak_bytes
    assert saved.warnings == ()
    assert len(cycle.warnings) == 1
    assert "reference cycles hold 1.00 MiB after each step" in cycle.warnings[0]
    assert "ctx.save_for_backward" in cycle.warnings[0]
