"""Tensors that a real backward pass changes in place, and those that it makes anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from actbench.measuring.meters.trace import AllocationTrace
from actbench.simulator import temporaries
from actbench.simulator.fake import fake_mode
from actbench.simulator.tracker import StorageTracker

SHAPE = (64, 256)


class Scattered(Function):
    """Selects columns; its derivative, written in Python, scatters into a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, :8].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        columns = torch.arange(8).expand(SHAPE[0], 8)
        return torch.zeros(SHAPE).scatter(1, columns, grad)


def recomputed(x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        kept = torch.where(x > 0, x, 0.0)
        return kept.masked_fill(x > 1, 0.0).sum(1)

    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "a gradient that is scattered": lambda x: x.topk(4, 1)[0],
    "gradients that are added by a formula": lambda x: torch.stack([each.sum() for each in torch.var_mean(x, 1)]),
    "gradients that are accumulated": lambda x: x.sin() + x.cos() + x.exp(),
    "gradients of pieces": lambda x: torch.stack([each.mean() for each in x.hsplit([1, 2, 3])]),
    "two gradients of one node": lambda x: x * x,
    "a mask over a gradient": lambda x: x.masked_fill(x > 0, 0.0),
    "a mask over a gradient of a choice": lambda x: torch.where(x > 1, x, 0.0).masked_fill(x > 0, 0.0),
    "rows by index": lambda x: x[torch.tensor([1, 3, 3])],
    "a derivative in Python": Scattered.apply,
    "a block that is recomputed": recomputed,
}


def peak(step: Callable[[Tensor], Tensor], x: Tensor) -> int:
    with AllocationTrace() as trace:
        trace.mark("begin")
        step(x).mean().backward()  # type: ignore[no-untyped-call]
        trace.mark("end")
    return trace.peak_bytes("begin", "end") - trace.live_bytes("begin")


@pytest.mark.parametrize("name", STEPS)
def test_a_simulated_backward_pass_holds_what_a_real_one_does(name: str) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    peak(STEPS[name], x)
    x.grad = None
    true = peak(STEPS[name], x)

    mode = fake_mode()
    with mode:
        fake = mode.from_tensor(x.detach().requires_grad_())
        with StorageTracker(temporaries=temporaries.cpu) as tracker:
            tracker.add([fake])
            before = tracker.live_bytes
            tracker.reset_peak()
            STEPS[name](fake).mean().backward()  # type: ignore[no-untyped-call]

    assert tracker.peak_bytes - before == pytest.approx(true, rel=0.002)
