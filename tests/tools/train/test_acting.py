from __future__ import annotations

import torch
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.scheme.setup import TrainingSetup
from actbench.tools.train.step import check_acts


class Looking(nn.Module):
    """A model whose forward pass runs on no fake tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * float(x.detach().numpy().std())
        return result


def test_a_model_that_runs_on_no_fake_tensor_is_trained_with_a_warning() -> None:
    setup = schemes.build("fewbit:3").apply(TrainingSetup(Looking(), loss=lambda model, batch: model(batch["x"]).sum()))
    (warning,) = check_acts(setup, CpuMeter(), {"x": torch.randn(3, 4)})

    assert warning.startswith("whether each part of the scheme acts is unknown: it cannot be run on fake tensors")
