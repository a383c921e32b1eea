from __future__ import annotations

import pytest
import torch

from actbench.errors import MeasurementError, UsageError
from actbench.measuring.meters import check_meter, open_meter
from actbench.model.context import CONTEXT_BYTES
from actbench.model.records import Case
from actbench.units import GIB


def case(**fields) -> Case:
    return Case(model="resnet18", batch_size=1, **fields)


def test_the_default_simulates_a_card_of_16_gib() -> None:
    meter = open_meter(case())

    assert (meter.name, meter.materialize, meter.memory_bytes) == ("simulated", False, 16 * GIB - CONTEXT_BYTES)


def test_a_limit_stands_for_a_smaller_card() -> None:
    meter = open_meter(case(device_profile="a100-80gb", memory_limit_bytes=8 * GIB))

    assert meter.memory_bytes == 8 * GIB


def test_the_cpu_has_real_weights() -> None:
    meter = open_meter(case(meter="cpu", memory_limit_bytes=GIB))

    assert (meter.name, meter.materialize, meter.memory_bytes) == ("cpu", True, GIB)


def test_a_wrong_profile_is_a_wrong_usage() -> None:
    with pytest.raises(UsageError, match=r"--device-profile 'rtx-309'.*rtx-3090"):
        open_meter(case(device_profile="rtx-309"))


def test_a_device_that_is_not_there_is_told_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_meter("simulated")
    check_meter("cpu")

    for asked in (lambda: check_meter("cuda"), lambda: open_meter(case(meter="cuda"))):
        with pytest.raises(MeasurementError, match="--meter cuda: torch sees no CUDA device here"):
            asked()
