"""Autocast and the scaler on the card that a script believes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation


@pytest.fixture(autouse=True)
def card() -> Iterator[Simulation]:
    with Simulation(profiles.get("rtx-4090")) as simulated:
        yield simulated


def product() -> Tensor:
    return torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")


def test_autocast_for_cuda_is_on_for_the_tensors_of_the_card() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert product().dtype == torch.bfloat16
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert product().dtype == torch.float32
            assert not torch.is_autocast_enabled("cuda")
        with torch.amp.autocast("cuda", dtype=torch.float16):
            assert product().dtype == torch.float16
        assert product().dtype == torch.bfloat16
    assert product().dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")


def test_autocast_has_the_default_type_of_each_device() -> None:
    assert torch.amp.is_autocast_available("cuda")
    with torch.autocast("cuda"):
        assert product().dtype == torch.float16
    with torch.autocast("cpu"):
        assert product().dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with pytest.warns(FutureWarning, match="deprecated"):
        older = torch.cuda.amp.autocast()
    with older:
        assert product().dtype == torch.float16


def test_a_function_of_ones_own_gets_autocast_by_its_decorators() -> None:
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cuda"), product().dtype))
            return gradient * 2

    x = torch.ones(2, requires_grad=True, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = Doubled.apply(x)
    y.sum().backward()

    assert seen == [(True, torch.bfloat16)]


def test_the_scaler_is_enabled_and_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cuda")

    assert scaler.is_enabled()
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))  # on the card it is made by its device, which is mapped
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    assert torch.equal(weight, torch.full((3,), 0.5))
