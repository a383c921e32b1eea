"""Averages of weights, and weights of models that are called in parts, are weights; data that stays is a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlptraining import FLOAT, ROWS, WEIGHTS, WIDTH, model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import actbench
from actbench.model.measured import Measurement, PeakParts

Update = Callable[[nn.Module], object]


def averaged(begin: Callable[[nn.Module], Update], *, on_host: bool = False) -> Measurement:
    """Return what is measured of a loop that updates an average of a model after each step."""
    with actbench.simulate("rtx-4090") as card:
        module = model()
        update = begin(module) if on_host else None
        module.cuda()
        update = update or begin(module)
        optimizer = torch.optim.AdamW(module.parameters())
        while True:
            module(torch.randn(ROWS, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                update(module)
    return card.measurement


def copied(module: nn.Module) -> Update:
    average = copy.deepcopy(module).requires_grad_(False)
    return lambda trained: [a.lerp_(p, 0.1) for a, p in zip(average.parameters(), trained.parameters(), strict=True)]


def copied_on_host(module: nn.Module) -> Update:
    average = copy.deepcopy(module).requires_grad_(False).cuda()
    return lambda trained: average


def by_torch(module: nn.Module) -> Update:
    average: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return lambda trained: average.update_parameters(trained)


def by_timm(module: nn.Module) -> Update:
    average = pytest.importorskip("timm.utils").ModelEmaV3(module)
    return lambda trained: average.update(trained)


def in_place(module: nn.Module) -> Update:
    average = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return lambda trained: [average[name].lerp_(tensor, 0.1) for name, tensor in trained.state_dict().items()]


def of_parameters(module: nn.Module) -> Update:
    average = [parameter.clone().detach() for parameter in module.parameters()]
    return lambda trained: [a.sub_(0.1 * (a - p)) for a, p in zip(average, trained.parameters(), strict=True)]


def made_anew(module: nn.Module) -> Update:
    average = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def update(trained: nn.Module) -> None:
        for name, tensor in trained.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * tensor

    return update


def parts_of(found: Measurement) -> PeakParts:
    assert found.peak_parts is not None
    return found.peak_parts


@pytest.mark.parametrize("begin", [copied, by_torch, by_timm, in_place, of_parameters, made_anew])
def test_an_average_of_the_weights_is_weights(begin: Callable[[nn.Module], Update]) -> None:
    found = averaged(begin)

    assert parts_of(found).weights_bytes == pytest.approx(2 * WEIGHTS, abs=512)  # torch's counts updates, in a tensor
    assert parts_of(found).batch_bytes == 0
    assert found.weights_bytes == pytest.approx(2 * WEIGHTS, abs=512)


def test_an_average_that_was_begun_in_host_memory_is_weights_of_the_card_too() -> None:
    assert parts_of(averaged(copied_on_host, on_host=True)).weights_bytes == 2 * WEIGHTS


def test_data_that_stays_on_the_card_is_no_weight_whatever_its_shape() -> None:
    def loop() -> None:
        module = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        data = torch.randn(WIDTH, WIDTH, device="cuda")
        masks = [data.clone(), torch.where(data > 0, module.weight.detach(), data)]
        optimizer = torch.optim.SGD(module.parameters())
        while True:
            module(masks[0] * masks[1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with actbench.simulate("rtx-4090") as card:
        loop()

    square = WIDTH * WIDTH * FLOAT
    assert parts_of(card.measurement).weights_bytes == square
    assert parts_of(card.measurement).batch_bytes >= 3 * square


def test_the_weights_of_a_model_that_is_called_in_parts_are_weights() -> None:
    with actbench.simulate("rtx-4090") as card:
        layer = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        while True:
            (torch.randn(ROWS, WIDTH, device="cuda") @ layer.weight.T).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert parts_of(card.measurement).weights_bytes == WIDTH * WIDTH * FLOAT
