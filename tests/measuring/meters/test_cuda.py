from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from actbench.errors import MeasurementError, OutOfMemoryError
from actbench.measuring.meters import profiles
from actbench.measuring.meters.cuda import CudaMeter, _set_allocator
from actbench.measuring.meters.simulated import SimulatedMeter
from actbench.setup import TrainingSetup
from actbench.units import GIB, MIB

ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``


def test_without_a_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(MeasurementError, match=r"no CUDA device here; use --meter simulated.*actbench doctor"):
        CudaMeter()


def test_a_setup_can_ask_for_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    setup = TrainingSetup(nn.Linear(WIDTH, WIDTH))

    _set_allocator(setup)
    assert asked == []
    _set_allocator(replace(setup, expandable_segments=True))

    assert asked == ["expandable_segments:True"]


@pytest.mark.gpu
def test_the_peak_is_the_simulated_one(step_of) -> None:
    """Both measure one MLP; cuBLAS's workspace, which no simulation knows, is the difference."""
    readings = []
    for meter in (CudaMeter(), SimulatedMeter(profiles.get("cuda-16gib"))):
        module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        readings.append(meter.memory(step_of(meter, module, lambda: {"x": torch.randn(2**16, WIDTH)})))
    measured, simulated = readings

    assert measured.weights_bytes == simulated.weights_bytes
    assert measured.gradients_bytes == simulated.gradients_bytes
    assert measured.optimizer_bytes == simulated.optimizer_bytes
    assert measured.activation_bytes == simulated.activation_bytes
    assert 0 <= measured.peak_bytes - simulated.peak_bytes <= 64 * MIB
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes


@pytest.mark.gpu
def test_the_limit_is_hard(step_of) -> None:
    meter = CudaMeter(1 * GIB)
    module = nn.Linear(WIDTH, WIDTH)

    with pytest.raises(OutOfMemoryError, match=r"may use 1\.00 GiB"):
        meter.memory(step_of(meter, module, lambda: {"x": torch.randn(2**22, WIDTH)}))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.gpu
def test_every_step_is_timed(mlp, rows, step_of) -> None:
    meter = CudaMeter()

    seconds = meter.seconds(step_of(meter, mlp, rows), 3)

    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)
