"""What every layer that keeps few bits of what flows through it does, beside the layer of torch that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.methods.actnn.layers import dropout, pool, relu
from actbench.methods.fewbit.stepwise import StepwiseActivation
from actbench.methods.fewbit.tables import table
from actbench.scheme.setup import TrainingSetup

Function = Callable[[Tensor], Tensor]


def converted(spec: str, layer: nn.Module) -> tuple[Function, Function]:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(layer))).module, layer


def both(ours: Any, name: str, *arguments: Any, **named: Any) -> tuple[Function, Function]:
    """Return a function and torch's of a name, with the same arguments."""
    return lambda x: ours(x, *arguments, **named), lambda x: getattr(F, name)(x, *arguments, **named)


class Called(nn.Module):
    """A network whose code calls an activation as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)  # a layer without tensors is told by numbers

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x * self.one)


GELU = nn.GELU()
SAME = {
    "relu": both(relu.relu, "relu"),
    "leaky_relu": both(relu.leaky_relu, "leaky_relu", 0.1),
    "dropout": both(dropout.dropout, "dropout", 0.3),
    "dropout in place": both(dropout.dropout, "dropout", 0.3, True, True),
    "dropout2d": both(partial(dropout.channel_dropout, 2), "dropout2d", 0.3),
    "dropout2d in place": both(partial(dropout.channel_dropout, 2), "dropout2d", 0.3, True, True),
    "max_pool2d": both(partial(pool.max_pool, 2), "max_pool2d", 3, 2, 1),
    "max_pool3d": both(partial(pool.max_pool, 3), "max_pool3d", 3, 2, 1),
    "avg_pool2d": both(partial(pool.avg_pool, 2), "avg_pool2d", 3, 2, 1),
    "avg_pool3d": both(partial(pool.avg_pool, 3), "avg_pool3d", 3, 2, 1),
    "adaptive_avg_pool2d": both(partial(pool.adaptive_avg_pool, 2), "adaptive_avg_pool2d", 2),
    "fewbit of ReLU6": converted("fewbit:3", nn.ReLU6()),
}
"""Those whose gradient is torch's to the bit, each with torch's own."""
NEAR = {
    "stepwise": (StepwiseActivation(nn.GELU(), table("gelu", 3), "GELU"), GELU),
    "fewbit of a call": converted("fewbit:3", Called()),
    "invact": converted("invact", GELU),
}
LAYERS = SAME | NEAR


def images(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    shape, memory = (3, 5, 9, 8), torch.channels_last
    if "3d" in name:
        shape, memory = (*shape, 7), torch.channels_last_3d
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype, memory_format=memory)


def run(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient; the input may be overwritten."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = function(leaf * 1)
    torch.manual_seed(2)
    return y, torch.autograd.grad(y, leaf, torch.randn_like(y))[0]


def saved(function: Function, x: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        function(x)
    return kept


@pytest.mark.parametrize("name", LAYERS)
def test_channels_last(name: str) -> None:
    (y, gradient), (expected, of_torch) = (run(function, images(name)) for function in LAYERS[name])

    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert gradient.stride() == of_torch.stride()
    assert name in NEAR or torch.equal(gradient, of_torch)


@pytest.mark.parametrize("name", LAYERS)
def test_a_retained_graph_gives_the_same_gradient_and_no_second_derivative(name: str) -> None:
    x = images(name).requires_grad_()
    y = LAYERS[name][0](x * 1).square().sum()
    first, again = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))

    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_where_no_gradient_is_needed(name: str) -> None:
    function = LAYERS[name][0]
    with torch.no_grad():
        assert saved(function, images(name).requires_grad_() * 1) == []
        assert function(images(name).requires_grad_() * 1).grad_fn is None
    assert saved(function, images(name)) == []
    assert function(images(name)).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    """What a product gives in half precision goes through; the gradient comes back in the product's type."""
    scale = nn.Parameter(torch.ones(()))
    with torch.autocast("cpu", dtype):
        torch.manual_seed(1)
        y = LAYERS[name][0](images(name, dtype) * scale.to(dtype))
        torch.manual_seed(1)
        expected = LAYERS[name][1](images(name, dtype) * scale.detach().to(dtype))
    y.sum().backward()  # type: ignore[no-untyped-call]

    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert scale.grad is not None
    assert scale.grad.dtype == torch.float32
    assert scale.grad.isfinite()
