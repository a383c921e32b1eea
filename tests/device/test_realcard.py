"""A card is simulated in a process that uses a real one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

SIMULATED = """
import torch
import actbench

def simulated():
    with actbench.simulate("rtx-4060") as card:
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            model(torch.randn(2**14, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "4060" in torch.cuda.get_device_name()
    return card.peak_bytes
"""


def trained() -> list[float]:
    """Return the losses of a few steps on the real card."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.GELU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(32, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.gpu
def test_a_real_card_trains_before_and_after_a_simulated_one() -> None:
    names: dict[str, object] = {}
    exec(SIMULATED, names)
    simulated = names["simulated"]
    assert callable(simulated)
    before, name = trained(), torch.cuda.get_device_name()
    allocated = torch.cuda.memory_allocated()

    peaks = [simulated() for _ in range(2)]
    after = trained()

    code = f"{SIMULATED}\nprint(simulated())"
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    alone = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True, check=True)
    assert peaks == 2 * [int(alone.stdout)]
    assert after == before
    assert torch.cuda.get_device_name() == name
    assert torch.cuda.memory_allocated() <= allocated
