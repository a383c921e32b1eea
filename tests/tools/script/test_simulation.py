"""A simulation of a card leaves everything as it was before, and lets errors pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from mlptraining import train
from torch import nn
from torch.optim import optimizer

import actbench
from actbench import scheme as schemes
from actbench.errors import UsageError


def test_everything_is_as_before_afterwards() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "device", "data", "type")}
    functions = {name: getattr(torch, name) for name in ("zeros", "empty_like", "tensor", "set_default_device")}

    with actbench.simulate("rtx-4090"):
        train()

    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert {name: getattr(torch, name) for name in functions} == functions
    assert type(torch.zeros(1000, 1000)) is torch.Tensor
    assert torch.zeros(2).device.type == "cpu"
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_parameter_registration_hooks


def test_there_is_no_such_card() -> None:
    with pytest.raises(UsageError, match="rtx-4090"):
        actbench.simulate("rtx-4091")


def test_errors_of_the_loop_pass() -> None:
    with pytest.raises(ZeroDivisionError), actbench.simulate("rtx-4090"):
        _ = 1 / 0

    assert type(torch.zeros(1000, 1000)) is torch.Tensor


@pytest.mark.slow
def test_nothing_is_left_alive() -> None:
    held = []
    with actbench.simulate("rtx-4090"):
        module = train(steps=2)
        held.append(weakref.ref(module))
        del module
    gc.collect()

    assert held[0]() is None


def test_a_scheme_whose_step_fails_leaves_no_hook_behind() -> None:
    """The hook took itself away at the next step of any optimizer of the process, which then raised."""
    before = dict(optimizer._global_optimizer_pre_hooks)

    def fail_after_a_step() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda()
        stepped = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        stepped.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), actbench.simulate("rtx-4090", scheme=schemes.build("fewbit:3")):
        fail_after_a_step()

    assert dict(optimizer._global_optimizer_pre_hooks) == before
