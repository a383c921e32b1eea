from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import OutOfMemoryError
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``
WEIGHTS = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


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


def test_a_peak_above_the_limit_is_measured_and_says_so(mlp, rows, step_of) -> None:
    peak = CpuMeter().memory(step_of(CpuMeter(), mlp, rows)).peak_bytes

    over, fits = (CpuMeter(limit).memory(step_of(CpuMeter(), mlp, rows)) for limit in (peak - 1, peak))

    assert (over.peak_bytes, over.memory_limit_bytes, over.over_limit_bytes) == (peak, peak - 1, 1)
    assert (fits.peak_bytes, fits.memory_limit_bytes, fits.over_limit_bytes) == (peak, peak, None)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("count", "optimizer"), [(4096, sgd), (1, None), (1, sgd)])
def test_the_peak_is_filled_with_what_the_simulation_says(mlp, step_of, count: int, optimizer: Any) -> None:
    meters = CpuMeter(), SimulatedMeter(profiles.get("cpu"))
    make = {} if optimizer is None else {"make_optimizer": optimizer}
    found = [
        meter.memory(step_of(meter, copy.deepcopy(mlp), lambda: {"x": torch.randn(count, WIDTH)}, **make))
        for meter in meters
    ]
    measured, simulated = (reading.peak_parts.model_dump() for reading in found)

    assert found[0].peak_phase == found[1].peak_phase
    assert sum(measured.values()) == found[0].peak_bytes
    if found[0].peak_phase != "optimizer":
        assert measured == simulated
    else:  # the meter looks at the loss afterwards, and Adam makes numbers of its own
        assert measured == {name: pytest.approx(amount, abs=4 * FLOAT) for name, amount in simulated.items()}


def test_state_that_was_there_before_is_state(mlp, rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, mlp, rows)

    first, second = meter.memory(step), meter.memory(step)

    assert first.peak_parts == second.peak_parts
    assert second.peak_parts.optimizer_bytes == 2 * WEIGHTS + 4 * FLOAT


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

    with pytest.raises(OutOfMemoryError, match=r"does not fit on the CPU.*in the forward pass.*--batch-size") as caught:
        meter.memory(step) if what == "memory" else meter.seconds(step, 1)
    assert caught.value.phase == "forward"


class Greedy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise MemoryError


def test_memory_that_runs_out_in_the_optimizer_asks_for_another(mlp, rows, step_of) -> None:
    meter = CpuMeter()
    step = step_of(meter, mlp, rows, make_optimizer=lambda module: Greedy(module.parameters(), lr=0.1))
    names = schemes.changing(("optimizer", "gradients"))

    with pytest.raises(OutOfMemoryError, match=rf"in the optimizer step.*--optimizer.*: {', '.join(names)}") as caught:
        meter.memory(step)
    assert caught.value.phase == "optimizer"
    assert names


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
    monkeypatch.setattr("actbench.machine.memory_left_bytes", lambda: 12345)

    assert CpuMeter().memory_bytes == 12345
