from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from actbench.errors import MeasurementError, OutOfMemoryError
from actbench.meters import profiles
from actbench.meters.simulated import SimulatedMeter

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``
WEIGHTS = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT
KEPT = (2 * ROWS * HIDDEN + ROWS * WIDTH) * FLOAT + FLOAT  # GELU's input and output, the output, the loss


@pytest.fixture(params=["cpu", "cuda-16gib"])
def meter(request: pytest.FixtureRequest) -> SimulatedMeter:
    return SimulatedMeter(profiles.get(request.param))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def rounded(meter: SimulatedMeter, *amounts: int) -> int:
    block = meter.profile.rounding_bytes
    return sum(-(-amount // block) * block for amount in amounts)


def test_a_step_equals_hand_arithmetic(meter, mlp, rows, step_of) -> None:
    reading = meter.memory(step_of(meter, mlp, rows))

    counters = 0 if meter.profile.is_cuda else 4 * FLOAT  # Adam's step counters: on the host beside a CUDA device
    assert reading.weights_bytes == WEIGHTS
    assert reading.gradients_bytes == WEIGHTS
    assert reading.optimizer_bytes == 2 * WEIGHTS + counters
    assert reading.activation_bytes == rounded(meter, KEPT - FLOAT, FLOAT)
    assert reading.loss is None


def test_the_peak_of_many_rows_is_at_the_start_of_backward(meter, mlp, step_of) -> None:
    rows = 4096
    reading = meter.memory(step_of(meter, mlp, lambda: {"x": torch.randn(rows, WIDTH)}, make_optimizer=sgd))

    wide, narrow = rows * HIDDEN * FLOAT, rows * WIDTH * FLOAT
    at_gelu = WEIGHTS + narrow + 2 * wide + 2 * wide  # batch; GELU's input and output; the gradients of both
    last_layer = (HIDDEN * WIDTH + WIDTH) * FLOAT
    least, most = at_gelu, at_gelu + last_layer + 16 * 512
    assert least <= reading.peak_bytes <= most


def test_foreach_makes_temporaries_of_the_whole_model(mlp, rows, step_of) -> None:
    """CUDA's AdamW holds one more tensor for every parameter than the CPU's, which goes through them one by one."""
    peaks = {
        name: SimulatedMeter(profiles.get(name)).memory(step_of(SimulatedMeter(profiles.get(name)), mlp, rows))
        for name in ("cpu",)
    }
    meter = SimulatedMeter(profiles.get("cuda-16gib"))
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    step = step_of(meter, module, lambda: {"x": torch.randn(1, 256)})
    weights = 8 * 256 * 256 * FLOAT

    reading = meter.memory(step)

    assert reading.peak_bytes >= (1 + 1 + 2 + 1) * weights  # weights, gradients, two moments, the temporary
    assert reading.peak_bytes < (1 + 1 + 2 + 1) * weights + 64 * 1024
    assert peaks


def test_nothing_is_alive_afterwards(meter, mlp, rows, step_of) -> None:
    step = step_of(meter, mlp, rows)
    meter.memory(step)

    assert all(parameter.grad is None for parameter in mlp.parameters())
    assert meter.memory(step) == meter.memory(step)


def test_peaks_are_the_same_from_run_to_run(meter, mlp, rows, step_of) -> None:
    readings = [meter.memory(step_of(meter, mlp, rows)) for _ in range(3)]

    assert readings[0] == readings[1] == readings[2]


def test_many_batches_of_one_setup_lie_on_a_line(meter, mlp, step_of) -> None:
    peaks = [
        meter.memory(step_of(meter, mlp, lambda n=n: {"x": torch.randn(n, WIDTH)})).activation_bytes
        for n in (1024, 2048, 3072)
    ]

    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] == 1024 * (2 * HIDDEN + WIDTH) * FLOAT


def test_the_batch_costs_neither_time_nor_memory(meter, mlp, step_of) -> None:
    reading = meter.memory(step_of(meter, mlp, lambda: {"x": torch.empty(10**9, WIDTH)}, make_optimizer=sgd))

    assert reading.activation_bytes > 10**12


def test_a_peak_above_the_limit_is_out_of_memory(mlp, rows, step_of) -> None:
    free = SimulatedMeter(profiles.get("t4"))
    peak = free.memory(step_of(free, mlp, rows)).peak_bytes
    fits, too_small = (SimulatedMeter(profiles.get("t4"), limit) for limit in (peak, peak - 1))

    assert fits.memory(step_of(fits, mlp, rows)).peak_bytes == peak
    with pytest.raises(OutOfMemoryError, match=r"on t4, which may use .*--batch-size") as caught:
        too_small.memory(step_of(too_small, mlp, rows))
    assert caught.value.peak_bytes == peak


def test_a_model_that_looks_at_values_is_refused_with_the_reason(meter, rows, step_of) -> None:
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(MeasurementError, match="needs the values of tensors.*--meter cpu"):
        meter.memory(step_of(meter, Looks(WIDTH, WIDTH), rows))


def test_it_has_no_clock(meter, mlp, rows, step_of) -> None:
    assert meter.seconds(step_of(meter, mlp, rows), 3) is None


def test_real_batches_are_made_fake(meter, mlp) -> None:
    placed = meter.place({"x": torch.ones(2, 3), "nested": [torch.ones(1)], "name": "kept"})

    assert placed["x"].fake_mode is placed["nested"][0].fake_mode
    assert placed["name"] == "kept"


def test_autocast_keeps_halves(meter, mlp, rows, step_of) -> None:
    from dataclasses import replace

    plain = step_of(meter, mlp, rows)
    plain.setup = replace(plain.setup, autocast_dtype=torch.bfloat16)

    reading = meter.memory(plain)

    halves = (2 * ROWS * HIDDEN + ROWS * WIDTH + ROWS * WIDTH + 2 * WIDTH * HIDDEN) * 2  # with cast weights and input
    assert halves <= reading.activation_bytes <= halves + ROWS * WIDTH * FLOAT + 8 * 512


def test_bytes_moved_to_the_host_leave_the_device_alone(mlp, rows, step_of) -> None:
    from actbench import schemes

    def reading(name: str, spec: str):
        meter = SimulatedMeter(profiles.get(name))
        module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        step = step_of(meter, module, lambda: {"x": torch.randn(4096, WIDTH)})
        step.setup = schemes.build(spec).apply(step.setup)
        return meter.memory(step)

    on_card = {spec: reading("cuda-16gib", spec).activation_bytes for spec in ("exact", "offload")}
    on_cpu = {spec: reading("cpu", spec).activation_bytes for spec in ("exact", "offload")}

    assert on_card["offload"] <= 3 * 512
    assert on_card["exact"] == 4096 * (2 * HIDDEN + WIDTH) * FLOAT + 512
    assert on_cpu["offload"] >= on_cpu["exact"]
