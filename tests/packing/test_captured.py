"""Training steps of converted models in CUDA graphs: each replay draws other seeds, and its mean gradient is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import actbench

DRAWS = 60
MOST_ERRORS = 4.5
"""Standard errors that two means may differ by."""


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(1024, 64), nn.GELU(), nn.Linear(64, 8),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec", ["actnn:L2,bits=2", "randomized:0.5", "fewbit:3+randomized:0.5", "gact:L1,bits=2", "smaq,on=activations"]
)
def test_each_replay_draws_anew_and_the_mean_is_that_of_eager_steps(spec: str) -> None:
    torch.manual_seed(0)
    exact = network().cuda()
    x = torch.randn(32, 3, 16, 16, device="cuda")
    model = actbench.convert(copy.deepcopy(exact), spec)

    def step(module: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(module(x).square().sum(), list(module.parameters())))

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step(model)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model)

    def replayed() -> list[Tensor]:
        graph.replay()
        return [each.clone() for each in captured]

    draws = [[run() for _ in range(DRAWS)] for run in (lambda: step(model), replayed)]
    assert any(not torch.equal(*pair) for pair in zip(*draws[1][:2], strict=True))
    for place, truth in enumerate(step(exact)):
        shares = [
            torch.stack([(draw[place] * truth).sum() / truth.square().sum() for draw in each]).cpu() for each in draws
        ]
        error = float(sum(each.var() for each in shares) / DRAWS) ** 0.5
        assert abs(float(shares[0].mean() - shares[1].mean())) < MOST_ERRORS * error + 1e-3
