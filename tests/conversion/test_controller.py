from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actbench
from actbench.conversion import conversion_of
from actbench.errors import ConversionError, SpecError, UsageError
from actbench.nn.forwardwrapper import ReboundForward
from actbench.nn.hooked import HookedForward


class Block(nn.Sequential):
    pass


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64)) for _ in range(3)))


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, rows: int = 32) -> Tensor:
    loss: Tensor = (model(batch()[:rows]) - batch().sin()[:rows]).square().mean()
    return loss


def is_plain(model: nn.Module) -> bool:
    bound = any(isinstance(vars(module).get("forward"), ReboundForward) for module in model.modules())
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not bound and not hooked and conversion_of(model) is None


@pytest.mark.parametrize("spec", ["gact", "gact:L1", "gact:L3", "gact:L2+checkpoint,blocks=Block"])
def test_a_loop_inside_trains_and_leaves_the_model_as_it_was(spec: str) -> None:
    model, before = network(), attributes(network())
    before = attributes(model)
    start = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with actbench.Controller(model, spec) as controller:
        assert conversion_of(model) is not None
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.iterate(lambda: loss_of(model, 8))
            losses.append(loss.item())

    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    assert attributes(model) == before
    assert is_plain(model)


def test_gradients_inside_are_those_of_a_converted_model() -> None:
    found = []
    for index in range(2):
        model = network()
        torch.manual_seed(5)
        if index:
            actbench.convert(model, "gact:L1")
            loss_of(model).backward()
        else:
            with actbench.Controller(model, "gact:L1"):
                loss_of(model).backward()
        found.append([p.grad for p in model.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = network()
    before = attributes(model)
    with contextlib.suppress(ZeroDivisionError), actbench.Controller(model, "gact:L2+checkpoint,blocks=Block"):
        loss_of(model)
        raise ZeroDivisionError

    assert attributes(model) == before
    assert is_plain(model)


def test_what_was_done_meanwhile_stays() -> None:
    model = network()
    with actbench.Controller(model):
        seen: list[int] = []
        model.register_forward_hook(lambda *_: seen.append(1))
        model.note = "kept"  # type: ignore[assignment]
        model.eval()

    model(batch())
    assert (seen, model.note, model.training) == ([1], "kept", False)


def test_a_loss_of_before_can_still_be_differentiated() -> None:
    exact = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = copy.deepcopy(exact)
    with actbench.Controller(model, "gact:L1.1"):
        loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    loss_of(exact).backward()  # type: ignore[no-untyped-call]

    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < 0.03 * other.grad.norm()


def test_closing_without_a_with_block() -> None:
    model = network()
    controller = actbench.Controller(model, "gact:L2")
    assert HookedForward.of(model) is not None
    controller.close()
    controller.close()

    assert is_plain(model)
    with pytest.raises(UsageError, match="this Controller is closed"):
        controller.iterate(lambda: loss_of(model))
    with pytest.raises(UsageError, match="this Controller is closed"), controller:
        pass


def test_one_model_after_the_other_and_inside_of_each_other() -> None:
    one, two = network(), network()
    before = attributes(one), attributes(two)
    with actbench.Controller(one), actbench.Controller(two):
        (loss_of(one) + loss_of(two)).backward()  # type: ignore[no-untyped-call]
    with actbench.Controller(one):
        loss_of(one).backward()  # type: ignore[no-untyped-call]

    assert (attributes(one), attributes(two)) == before


def test_they_may_be_closed_in_any_order() -> None:
    one, two = network(), network()
    first, second = actbench.Controller(one), actbench.Controller(two)
    first.close()

    assert is_plain(one)
    assert HookedForward.of(two) is not None
    loss_of(two).backward()  # type: ignore[no-untyped-call]
    second.close()
    assert is_plain(two)


@pytest.mark.parametrize("spec", ["gact", "fewbit:3"])
def test_a_converted_model_is_refused_and_stays_as_it_is(spec: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    actbench.convert(model, spec)
    before = attributes(model)

    with pytest.raises(ConversionError, match="already converted"):
        actbench.Controller(model)
    with pytest.raises(ConversionError, match="already converted"):
        actbench.Controller(nn.Sequential(model))
    assert attributes(model) == before


def test_the_same_model_twice_is_refused() -> None:
    model = network()
    with actbench.Controller(model) as controller:
        with pytest.raises(ConversionError, match="already converted"):
            actbench.Controller(model)
        with pytest.raises(UsageError, match="entered before"), controller:
            pass
        assert HookedForward.of(model) is not None

    assert is_plain(model)


@pytest.mark.parametrize("spec", ["actnn", "fewbit:3", "checkpoint,blocks=Block", "offload", "gact+fewbit:3"])
def test_schemes_that_cannot_be_taken_off_are_refused(spec: str) -> None:
    model = network()
    before = attributes(model)
    with pytest.raises(ConversionError, match=r"takes gact, alone or with checkpoint; use actbench\.convert"):
        actbench.Controller(model, spec)

    assert attributes(model) == before


def test_a_wrong_specification_is_refused() -> None:
    with pytest.raises(SpecError, match="gact"):
        actbench.Controller(network(), "gact:L9")


def test_a_forward_that_others_put_in_front_is_refused_until_it_is_gone() -> None:
    model = network()
    controller = actbench.Controller(model, "gact:L2+checkpoint,blocks=Block")
    bound = model.forward
    model.forward = lambda x: bound(x)  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match="take that one off first"):
        controller.close()
    assert "forward" not in vars(model[0])

    model.forward = bound  # type: ignore[method-assign]
    controller.close()
    assert is_plain(model)


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


def test_a_root_that_is_a_block_itself() -> None:
    model = Block(nn.Linear(64, 64), nn.Tanh())
    before = attributes(model)
    with actbench.Controller(model, "gact+checkpoint,blocks=Block"):
        loss_of(model).backward()  # type: ignore[no-untyped-call]

    assert attributes(model) == before
