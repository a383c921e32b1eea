from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from controlled import Block, batch, is_plain, loss_of, network
from torch import nn

import actbench
from actbench.errors import ConversionError, SpecError, UsageError
from actbench.packing.hooked import HookedForward
from actbench.tools.convert.model import conversion_of


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


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


@pytest.mark.parametrize("spec", ["actnn", "randomized:0.5", "checkpoint,blocks=Block", "offload", "gact+lora:4"])
def test_any_scheme_of_a_model_is_taken_off_again(spec: str) -> None:
    model = network()
    before = attributes(model)
    with actbench.Controller(model, spec) as controller:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        controller.iterate(lambda: loss_of(model, 8))
        assert conversion_of(model) is not None

    assert attributes(model) == before
    assert is_plain(model)


def test_weights_of_four_bits_are_refused_and_the_model_stays_as_it_is() -> None:
    model = network()
    before, weight = attributes(model), model.state_dict()["0.0.weight"].clone()
    with pytest.raises(ConversionError, match="'qlora:4' cannot be undone"):
        actbench.Controller(model, "qlora:4")

    assert attributes(model) == before
    assert torch.equal(model.state_dict()["0.0.weight"], weight)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_wrong_specification_is_refused() -> None:
    with pytest.raises(SpecError, match="gact"):
        actbench.Controller(network(), "gact:L9")


def test_a_forward_that_others_put_in_front_is_refused_until_it_is_gone() -> None:
    model = network()
    controller = actbench.Controller(model, "gact:L2+checkpoint,blocks=Block")
    bound = model.forward
    model.forward = lambda x: bound(x)  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match="remove that one first"):
        controller.close()
    assert "forward" not in vars(model[0])

    model.forward = bound  # type: ignore[method-assign]
    controller.close()
    assert is_plain(model)


def test_a_root_that_is_a_block_itself() -> None:
    model = Block(nn.Linear(64, 64), nn.Tanh())
    before = attributes(model)
    with actbench.Controller(model, "fewbit:3+checkpoint,blocks=Block"):
        loss_of(model).backward()  # type: ignore[no-untyped-call]

    assert attributes(model) == before
