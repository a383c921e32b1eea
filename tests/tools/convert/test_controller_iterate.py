"""Bits that are allocated by the loss of one's own training loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actbench
from actbench.errors import UsageError
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked import HookedForward
from actbench.tools.convert.model import conversion_of


class Block(nn.Sequential):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64)) for _ in range(3)))


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, rows: int = 32) -> Tensor:
    loss: Tensor = (model(batch()[:rows]) - batch().sin()[:rows]).square().mean()
    return loss


def is_plain(model: nn.Module) -> bool:
    bound = any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not bound and not hooked and conversion_of(model) is None


class Bits:
    """What the places of a model are given, and how often the model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.runs = model, 0
        model[0].register_forward_hook(self._count)  # type: ignore[index, operator]

    def _count(self, *_: object) -> None:
        self.runs += 1

    def __call__(self) -> list[float]:
        hooked = HookedForward.of(self.model)
        assert hooked is not None
        return [place.bits for place in hooked.hooks.sites if place.elements]


def test_iterate_shares_bits_out_by_ones_own_loss_when_it_is_due() -> None:
    model = network()
    bits, called = Bits(model), []

    def own() -> Tensor:
        called.append(1)
        return loss_of(model, 8)

    with actbench.Controller(model, "gact:L2,adapt_interval=3,bits=3") as controller:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        assert bits.runs == 2  # the first forward shares them out by itself
        for _ in range(7):
            controller.iterate(own)
        assert len(called) == 3
        assert bits.runs == 2 + 3
        loss_of(model)
        assert bits.runs == 2 + 3 + 1  # and then not any more


def test_iterate_gives_more_bits_to_what_matters_to_the_loss() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.last = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            pairs = zip(self.layers, self.last, strict=True)
            return torch.stack([last(layer(x).relu()) for layer, last in pairs])

    model = Branches()
    weights = torch.ones(8, 1, 1)
    weights[2] = 1000
    with actbench.Controller(model, "gact:L2.2") as controller:
        controller.iterate(lambda: (model(batch()[:8]) * weights).mean())
        hooked = HookedForward.of(model)
        assert hooked is not None
        bits = [place.bits for place in hooked.hooks.sites if place.elements]

    assert len(bits) == 8
    assert bits[2] == 8
    assert max(bits[:2] + bits[3:]) < 8
    assert all(p.grad is None for p in model.parameters())


def test_a_level_of_fixed_bits_has_nothing_to_share_out() -> None:
    model = network()
    with actbench.Controller(model, "gact:L1") as controller:
        controller.iterate(lambda: pytest.fail("called"))


@pytest.mark.parametrize("loss", [torch.ones(3, requires_grad=True), torch.ones(()), 0.5])
def test_a_loss_that_is_none_is_refused_and_leaves_nothing(loss: Any) -> None:
    model = network()
    with actbench.Controller(model) as controller:
        with pytest.raises(UsageError, match="a scalar with its graph"):
            controller.iterate(lambda: loss)
        hooked = HookedForward.of(model)
        assert hooked is not None
        assert not hooked.hooks.probing

    assert is_plain(model)
