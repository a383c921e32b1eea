"""A simulation of a card leaves everything as it was before, and lets errors pass."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

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
    assert not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    assert not nn.modules.module._global_parameter_registration_hooks


def test_there_is_no_such_card() -> None:
    with pytest.raises(UsageError, match="rtx-4090"):
        actbench.simulate("rtx-4091")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("memory_limit_bytes", value) for value in (-1, 0, "x", math.nan, 1.5, True, 2**63)),
        *(("steps", value) for value in (-1, 0, 1.5, 10**30, "2")),
        *(("batch_size", value) for value in (0, "8", 10**30)),
        *(("processes", value) for value in (0, -1, 10**9, None)),
        *(("raise_oom", value) for value in ("yes", 2)),
    ],
)
def test_a_bad_option_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        actbench.simulate(**{"device_profile": "rtx-4060", name: value})

    assert str(refused.value).startswith(f"simulate: {name}: {value!r} must be ")


def test_an_option_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'memory_limit'"):
        actbench.simulate("rtx-4060", memory_limit=2**30)


def test_a_simulation_inside_of_another_is_refused_and_the_outer_one_goes_on() -> None:
    with actbench.simulate("rtx-4090") as card:
        with pytest.raises(UsageError, match="inside of another"), actbench.simulate("rtx-4060"):
            pass
        assert torch.cuda.get_device_name() == "rtx-4090"
        train()

    assert card.peak_bytes > 0
    assert not torch.cuda.is_initialized()


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
