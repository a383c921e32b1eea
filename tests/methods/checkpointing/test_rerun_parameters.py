"""Recomputed blocks whose parameters are others, or have other values, when they run again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.scheme.setup import TrainingSetup

SPECS = ["checkpoint,blocks=Block", "selective,blocks=Block", "checkpoint,blocks=Block+gact:L0"]


class Block(nn.Module):
    """A block with a buffer that is larger than those that are always copied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("table", torch.linspace(1, 2, 50_000))

    def forward(self, x: Tensor) -> Tensor:
        table: Any = self.table
        return x + self.narrow(torch.tanh(self.wide(self.norm(x)))) * table[:8].cos()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def converted(spec: str) -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(model())).module


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tied", [False, True])
def test_they_run_again_with_the_tensors_of_functional_call(spec: str, tied: bool) -> None:
    def gradients(module: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        given = {name: torch.randn_like(each).requires_grad_() for name, each in module.named_parameters()}
        tables = {name: torch.rand_like(each) for name, each in module.named_buffers()}
        if tied:
            given["1.wide.weight"] = given["0.wide.weight"]
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        functional_call(module, {**given, **tables}, (X,)).square().sum().backward()
        now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert all(now[name] is each and each.grad is None for name, each in own.items())
        return [each.grad for each in given.values() if each.grad is not None]

    for one, other in zip(gradients(converted(spec)), gradients(model()), strict=True):
        torch.testing.assert_close(one, other)


def replaced(weight: Tensor) -> None:
    weight.data = weight.data * 2


def written(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("change", "how"), [(replaced, r"got other memory through \.data"), (written, "was changed in place")]
)
@pytest.mark.parametrize("name", ["wide.weight", "narrow.bias"])
def test_a_parameter_that_changed_in_between_is_refused(spec: str, change: Any, how: str, name: str) -> None:
    module = converted(spec)
    loss = module(X).square().sum()
    change(module.get_parameter(f"1.{name}"))

    with pytest.raises(ConversionError, match=rf"^{name} of a recomputed Block {how} between"):
        loss.backward()


@pytest.mark.parametrize("spec", SPECS)
def test_what_changed_outside_of_the_blocks_or_after_the_backward_pass_is_nobodys_business(spec: str) -> None:
    module, exact = converted(spec), model()
    for each in (module, exact):
        for _ in range(2):
            loss = each(X).square().sum()
            replaced(each.get_parameter("2.bias"))
            loss.backward()
            torch.optim.SGD(each.parameters(), lr=0.01).step()
            replaced(each.get_parameter("0.wide.weight"))

    for one, other in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_that_is_kept_is_not_run_again_with_later_weights() -> None:
    module = converted("checkpoint,blocks=Block")
    loss = module(X).square().sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(module.get_submodule("1").parameters(), lr=0.01).step()

    with pytest.raises(ConversionError, match="was changed in place between"):
        loss.backward()
    copy.deepcopy(module)(X).square().sum().backward()
