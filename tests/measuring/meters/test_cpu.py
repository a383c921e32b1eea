from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench.errors import OutOfMemoryError
from actbench.measuring.meters.cpu import CpuMeter

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``
WEIGHTS = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT


def test_a_step_equals_hand_arithmetic(mlp, rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, mlp, rows)

    reading = meter.memory(step)

    assert reading.weights_bytes == WEIGHTS
    assert reading.gradients_bytes == WEIGHTS
    assert reading.optimizer_bytes == 2 * WEIGHTS + 4 * FLOAT
    assert reading.activation_bytes == (2 * ROWS * HIDDEN + ROWS * WIDTH) * FLOAT + FLOAT
    assert reading.loss is not None
    assert reading.loss > 0


def test_the_peak_of_the_optimizer_equals_hand_arithmetic(step_of) -> None:
    """With one row, the peak is in AdamW, which holds two temporaries for one parameter at a time."""
    meter = CpuMeter()
    module = nn.Linear(1000, 1000, bias=False)
    weight = 1000 * 1000 * FLOAT
    batch = 1000 * FLOAT

    reading = meter.memory(step_of(meter, module, lambda: {"x": torch.randn(1, 1000)}))

    held = (1 + 1 + 2) * weight + batch  # weight, gradient, two moments; the batch
    assert held + 2 * weight <= reading.peak_bytes <= held + 2 * weight + 16 * FLOAT  # counter, loss


def test_a_second_reading_is_the_same(mlp, rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, mlp, rows)

    first, second = meter.memory(step), meter.memory(step)

    assert first.peak_bytes == second.peak_bytes
    assert first.activation_bytes == second.activation_bytes


def test_a_peak_above_the_limit_is_out_of_memory(mlp, rows, step_of) -> None:
    peak = CpuMeter().memory(step_of(CpuMeter(), mlp, rows)).peak_bytes

    with pytest.raises(OutOfMemoryError, match=r"the CPU, which may use .*--batch-size") as caught:
        CpuMeter(peak - 1).memory(step_of(CpuMeter(), mlp, rows))
    assert caught.value.peak_bytes == peak
    assert CpuMeter(peak).memory(step_of(CpuMeter(), mlp, rows)).peak_bytes == peak


class TooLarge(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.empty(2**60).sum()


class Cramped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("std::bad_alloc")  # as torch says of what C++ allocates


@pytest.mark.parametrize("layer", [TooLarge, Cramped])
@pytest.mark.parametrize("what", ["memory", "seconds"])
def test_a_failed_allocation_is_out_of_memory(what: str, layer: type[nn.Linear], rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, layer(WIDTH, WIDTH), rows)

    with pytest.raises(OutOfMemoryError, match="does not fit on the CPU") as caught:
        meter.memory(step) if what == "memory" else meter.seconds(step, 1)
    assert caught.value.peak_bytes is None


def test_every_step_is_timed_and_trains(mlp, rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, mlp, rows)
    before = mlp[0].weight.detach().clone()

    seconds = meter.seconds(step, 3)

    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)
    assert not torch.equal(before, mlp[0].weight)


def test_without_a_limit_it_may_use_what_is_available() -> None:
    assert CpuMeter().memory_bytes > 2**20
    assert CpuMeter(12345).memory_bytes == 12345


def test_what_is_available_is_what_its_container_leaves(monkeypatch) -> None:
    monkeypatch.setattr("actbench.results.machine.memory_left_bytes", lambda: 12345)

    assert CpuMeter().memory_bytes == 12345
