"""The block in which a device is simulated, and what a case finds in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from actbench.errors import MeasurementError
from actbench.measuring.bench import measure
from actbench.model.records import Case
from actbench.simulator import card, profiles
from actbench.simulator.fake import fake_mode, to_fake
from actbench.simulator.profiles import DeviceProfile

T4 = profiles.get("t4")


def test_a_block_has_a_card_and_nothing_of_it_stays() -> None:
    before = torch.cuda.is_available()
    with card.simulated(T4):
        assert card.place() == card.CARD
        assert torch.cuda.get_device_capability() == (7, 5)
        with card.simulated(T4):
            assert torch.cuda.is_available()
        assert torch.cuda.is_available()

    assert card.place() == card.CPU
    assert torch.cuda.is_available() == before


def test_one_block_has_one_card() -> None:
    other = card.simulated(profiles.get("h100-80gb"))
    with card.simulated(T4), pytest.raises(MeasurementError, match="in use in this process"), other:
        pass


def test_what_is_entered_until_the_end_is_entered_once() -> None:
    seen: list[str] = []

    @contextmanager
    def entered(profile: DeviceProfile) -> Iterator[None]:
        seen.append(profile.name)
        yield
        seen.append("end")

    with card.simulated(T4):
        with card.simulated(T4):
            card.until_the_end(entered)
        card.until_the_end(entered)
        assert seen == [T4.name]

    assert seen == [T4.name, "end"]


def test_fake_parameters_move_and_stay_the_same_objects() -> None:
    mode = fake_mode()
    module = to_fake(nn.Linear(3, 4), mode)
    before = list(module.parameters())
    with card.simulated(T4):
        to_fake(module, mode, card.CARD)

        assert [each.device for each in module.parameters()] == [card.CARD] * 2
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))


def test_a_process_that_trained_simulates_a_card_and_trains_on() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    case = Case(model="resnet-cifar", scheme="exact", batch_size=2, meter="simulated", device_profile="t4")

    peaks = {measure(case).peak_bytes for _ in range(2)}
    layer(torch.ones(1, 2)).sum().backward()

    assert len(peaks) == 1
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
