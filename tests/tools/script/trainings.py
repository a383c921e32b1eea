"""A script that trains, for tests of what actbench says of scripts."""

from __future__ import annotations

from collections.abc import Callable

from actbench.model.measured import Measurement
from actbench.model.records import Failure

TRAINING = """
import torch, sys
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=512, shuffle=True, num_workers=2):
    hidden = model[1](model[0](x.cuda()))
    loss = model[2](hidden).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""
WEIGHTS = (2 * 256 * 1024 + 1024 + 256) * 4

RunScript = Callable[..., Measurement | Failure]
"""Runs a script of a text, with its arguments, and returns its outcome."""
