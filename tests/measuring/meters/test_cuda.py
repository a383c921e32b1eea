from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from actbench.errors import MeasurementError, OutOfMemoryError
from actbench.measuring.meters import cuda, profiles
from actbench.measuring.meters.cuda import CudaMeter, _set_allocator
from actbench.measuring.meters.simulated import SimulatedMeter
from actbench.setup import TrainingSetup, TrainStep
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


class Counters:
    """Stands for torch's counters of memory: each part of a step has its own peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: list[int], peaks: list[int], reserved: list[int]):
        self.peaks, self.reserved, self.allocated = peaks, reserved, iter(allocated)
        self.part = 0
        for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "_process_bytes", lambda: None)

    def memory_allocated(self) -> int:
        return next(self.allocated)

    def max_memory_allocated(self) -> int:
        return self.peaks[self.part]

    def max_memory_reserved(self) -> int:
        return self.reserved[self.part]

    def reset_peak_memory_stats(self) -> None:
        self.part += 1


def on_the_cpu(rows: int = 2, parts: int = 1) -> TrainStep:
    def loss(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return module(batch["x"]).sum()

    setup = TrainingSetup(nn.Linear(8, 4, bias=False), loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    setup = replace(setup, micro_batches=parts)
    return TrainStep(setup, {"x": torch.randn(rows, 8)})


@pytest.mark.parametrize(
    ("peaks", "phase"), [([900, 500, 600], "forward"), ([500, 900, 600], "backward"), ([500, 600, 900], "optimizer")]
)
def test_the_peak_is_that_of_the_part_with_the_highest(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int], phase: str
) -> None:
    Counters(monkeypatch, [200, 350], peaks, [1000, 3000, 2000])

    reading = cuda._read(on_the_cpu())

    assert (reading.peak_bytes, reading.peak_phase) == (900, phase)
    assert (reading.reserved_bytes, reading.activation_bytes) == (3000, 150)
    assert (reading.peak_parts is None) == (phase != "optimizer")


@pytest.mark.parametrize(
    ("peaks", "phase"),
    [
        ([500, 600, 900, 700, 800], "forward"),
        ([500, 900, 600, 700, 800], "backward"),
        ([500, 600, 700, 900, 800], "backward"),
        ([500, 600, 700, 800, 900], "optimizer"),
    ],
)
def test_a_later_micro_batch_has_a_forward_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int], phase: str
) -> None:
    Counters(monkeypatch, [200, 350], peaks, [1000, 1000, 1000, 3000, 2000])

    reading = cuda._read(on_the_cpu(rows=4, parts=2))

    assert (reading.peak_bytes, reading.peak_phase, reading.reserved_bytes) == (900, phase, 3000)
    assert reading.activation_bytes == 150


def test_what_fills_the_peak_is_known_in_the_step_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350], [500, 600, 900], [1, 1, 1])
    weights = 8 * 4 * 4

    parts = cuda._read(on_the_cpu()).peak_parts

    assert parts is not None
    assert parts.model_dump() == {
        "weights_bytes": weights,
        "gradients_bytes": weights,
        "optimizer_bytes": 0,
        "activation_bytes": 0,
        "batch_bytes": 200 - weights,
        "temporary_bytes": 900 - 200 - weights,
    }


def test_gradients_that_never_are_there_together_leave_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350], [100, 150, 210], [1, 1, 1])

    assert cuda._read(on_the_cpu()).peak_parts is None
