"""Simulated, layers whose backward pass goes piece by piece run one piece, and count the operators of all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from actbench import schemes
from actbench.measuring.meters import profiles
from actbench.measuring.meters.simulated import SimulatedMeter
from actbench.nn.compressed import dropout, pool, savedinput
from actbench.setup import TrainingSetup, TrainStep

ROWS = 1024


def setup(layer: nn.Module) -> TrainingSetup:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), layer)
    exact = TrainingSetup(
        model,
        lambda module, batch: module(batch["x"]).sum(),
        lambda module: torch.optim.SGD(module.parameters()),
    )
    return schemes.build("actnn:L2").apply(exact)


@pytest.mark.parametrize(("layer", "file"), [(nn.Dropout(), dropout), (nn.MaxPool2d(2), pool)])
def test_one_piece_runs_and_all_are_counted(layer: nn.Module, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, int]] = []

    def unpacked(codes: torch.Tensor, bits: int, first: int, last: int) -> torch.Tensor:
        ran.append((first, last))
        return savedinput.unpacked(codes, bits, first, last)

    monkeypatch.setattr(file, "unpacked", unpacked)
    monkeypatch.setattr(savedinput, "PIECE", 256)
    meter = SimulatedMeter(profiles.get("t4"))
    step = meter.adopt(setup(layer))
    with meter.active():
        meter.memory(TrainStep(step, meter.place({"x": torch.ones(ROWS, 1, 4, 4)})))
    counted = Counter(each.work.label for each in meter.done)

    assert len(ran) == 1
    first, last = ran[0]
    elements = ROWS * 2 * (4 * 4 if file is dropout else 2 * 2)
    assert counted["unpack_codes"] == elements / (last - first) > 1
