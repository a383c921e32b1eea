from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.errors import UntraceableError
from actbench.scheme.conditions import Precision
from actbench.simulator import profiles
from actbench.simulator.cublas import Workspaces
from actbench.simulator.simulated import SimulatedMeter

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``
WEIGHTS = (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT
KEPT = (2 * ROWS * HIDDEN + ROWS * WIDTH) * FLOAT + FLOAT  # GELU's input and output, the output, the loss


def profile(name: str) -> profiles.DeviceProfile:
    """Return a device on which the workspaces of cuBLAS stay, wherever a peak is."""
    return replace(profiles.get(name), torch=(2, 14))


@pytest.fixture(params=["cpu", "cuda-16gib"])
def meter(request: pytest.FixtureRequest) -> SimulatedMeter:
    return SimulatedMeter(profile(request.param))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def rounded(meter: SimulatedMeter, *amounts: int) -> int:
    block = meter.profile.rounding_bytes
    return sum(-(-amount // block) * block for amount in amounts)


def sum_buffer(meter: SimulatedMeter) -> int:
    """Return the bytes in which 64 blocks of CUDA, each with 128 results in a row, leave the sums of a last bias."""
    return FLOAT * WIDTH * 64 * 128 + 512 if meter.profile.is_cuda else 0


def test_a_step_equals_hand_arithmetic(meter, mlp, rows, step_of) -> None:
    reading = meter.memory(step_of(meter, mlp, rows))

    counters = 0 if meter.profile.is_cuda else 4 * FLOAT  # Adam's step counters: on the host beside a CUDA device
    assert reading.weights_bytes == WEIGHTS
    assert reading.gradients_bytes == WEIGHTS
    assert reading.optimizer_bytes == 2 * WEIGHTS + counters
    assert reading.activation_bytes == rounded(meter, KEPT - FLOAT, FLOAT)
    assert reading.loss is None


def test_the_peak_of_many_rows_is_in_the_backward_of_the_last_layer(meter, mlp, step_of) -> None:
    rows = 4096
    reading = meter.memory(step_of(meter, mlp, lambda: {"x": torch.randn(rows, WIDTH)}, make_optimizer=sgd))

    wide, narrow = rows * HIDDEN * FLOAT, rows * WIDTH * FLOAT
    tensors = 3 * wide + 2 * narrow  # GELU's input, output and its gradient; the batch and the output's gradient
    last_layer = (HIDDEN * WIDTH + WIDTH) * FLOAT  # its gradients
    ends = 2 * rounded(meter, FLOAT)  # loss and its gradient
    more = sum(Workspaces(meter.profile).kept.values()) + sum_buffer(meter)
    assert reading.peak_bytes == WEIGHTS + tensors + last_layer + ends + more


def test_foreach_makes_temporaries_of_the_whole_model(step_of) -> None:
    """CUDA's AdamW takes the root of all second moments at once; the CPU's one after the other."""
    layers, weight = 8, 256 * 256 * FLOAT
    peaks = {}
    for name in ("cpu", "cuda-16gib"):
        meter = SimulatedMeter(profile(name))
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
        peaks[name] = meter.memory(step_of(meter, module, lambda: {"x": torch.randn(1, 256)})).peak_bytes

    held = (1 + 1 + 2) * layers * weight  # weights, gradients, two moments
    small = 32 * 1024  # batch, loss, one row of output for each layer
    # root and denominator of one parameter, and the denominator of the one before
    assert held + 3 * weight <= peaks["cpu"] <= held + 3 * weight + small
    held += sum(Workspaces(profile("cuda-16gib")).kept.values())
    assert held + layers * weight <= peaks["cuda-16gib"] <= held + layers * weight + small


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


def test_no_batch_is_too_large_to_simulate(mlp, step_of) -> None:
    meter = SimulatedMeter(profiles.get("h200"), memory_limit_bytes=2**60)

    reading = meter.memory(step_of(meter, mlp, lambda: {"x": torch.empty(10**9, WIDTH)}, make_optimizer=sgd))

    assert reading.activation_bytes == 10**9 * (2 * HIDDEN + WIDTH) * FLOAT + 512


def test_a_step_that_does_not_fit_has_the_numbers_of_one_that_does(meter, mlp, rows, step_of) -> None:
    reading = meter.memory(step_of(meter, mlp, rows))
    needed = max(reading.peak_bytes, reading.reserved_bytes or 0)
    fits, over = (SimulatedMeter(meter.profile, needed - less) for less in (0, 1))

    assert reading.over_limit_bytes is None
    assert fits.memory(step_of(fits, mlp, rows)) == replace(reading, memory_limit_bytes=needed)
    found = over.memory(step_of(over, mlp, rows))
    assert found.memory_limit_bytes == needed - 1
    assert 1 <= found.over_limit_bytes == max(found.peak_bytes, found.reserved_bytes or 0) - (needed - 1)
    ours = {"memory_limit_bytes": needed, "over_limit_bytes": None, "reserved_bytes": reading.reserved_bytes}
    assert replace(found, **ours) == replace(reading, memory_limit_bytes=needed)


def test_a_card_that_is_far_too_small_is_over_by_at_least_what_the_peak_is(mlp, rows, step_of) -> None:
    meter = SimulatedMeter(profiles.get("t4"), 1000)
    reading = meter.memory(step_of(meter, mlp, rows))

    assert reading.over_limit_bytes >= reading.peak_bytes - 1000
    assert reading.over_limit_bytes == reading.reserved_bytes - 1000


PHASES = [  # rows, make_optimizer, and where the peak must be
    (4096, "sgd", "backward"),
    (1, "adamw", "optimizer"),
]


@pytest.mark.parametrize(("count", "optimizer", "phase"), PHASES)
def test_the_peak_is_told_with_what_fills_it(meter, mlp, step_of, count: int, optimizer: str, phase: str) -> None:
    make = {"make_optimizer": sgd} if optimizer == "sgd" else {}
    reading = meter.memory(step_of(meter, mlp, lambda: {"x": torch.randn(count, WIDTH)}, **make))
    parts = reading.peak_parts

    assert reading.peak_phase == phase
    assert sum(parts.model_dump().values()) == reading.peak_bytes
    assert parts.weights_bytes == WEIGHTS
    assert parts.batch_bytes == rounded(meter, count * WIDTH * FLOAT)
    assert parts.optimizer_bytes == reading.optimizer_bytes
    if phase == "optimizer":
        assert (parts.gradients_bytes, parts.activation_bytes) == (
            reading.gradients_bytes,
            rounded(meter, FLOAT),
        )  # the loss
        assert parts.temporary_bytes > 0
    else:
        wide, last_layer = count * HIDDEN * FLOAT, (HIDDEN * WIDTH + WIDTH) * FLOAT
        assert parts.gradients_bytes == last_layer
        assert parts.activation_bytes == 2 * wide + rounded(meter, FLOAT)  # GELU's input and output, the loss
        on_their_way = wide + count * WIDTH * FLOAT + rounded(meter, FLOAT)
        assert parts.temporary_bytes == on_their_way + sum(Workspaces(meter.profile).kept.values()) + sum_buffer(meter)


def test_a_peak_in_the_forward_pass_is_told(meter, step_of) -> None:
    class Wide(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                seen = torch.cat([x] * 9).mean()
            return super().forward(x) + seen

    reading = meter.memory(step_of(meter, Wide(8, 8), lambda: {"x": torch.randn(4096, 8)}))

    assert reading.peak_phase == "forward"
    assert sum(reading.peak_parts.model_dump().values()) == reading.peak_bytes
    assert reading.peak_parts.temporary_bytes >= 9 * 4096 * 8 * FLOAT
    assert reading.peak_parts.gradients_bytes == 0


def test_segments_that_grow_are_replayed(mlp, rows, step_of) -> None:
    """No tensor of this step has more than 1 MiB, so pages of 20 MiB are mapped for the workspace alone."""
    meter = SimulatedMeter(profiles.get("t4"))
    step = step_of(meter, mlp, rows)
    step.setup = replace(step.setup, expandable_segments=True)

    reading = meter.memory(step)

    assert max(parameter.nbytes for parameter in mlp.parameters()) <= 2**20
    assert reading.reserved_bytes % 2**21 == 0
    assert reading.peak_bytes <= reading.reserved_bytes < 20 * 2**20 + 20 * 2**20


def test_a_model_that_looks_at_values_is_refused_with_the_reason(meter, rows, step_of) -> None:
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(UntraceableError, match=r"looks at the values of tensors.*--meter cpu"):
        meter.memory(step_of(meter, Looks(WIDTH, WIDTH), rows))


def test_it_has_no_clock(meter, mlp, rows, step_of) -> None:
    assert meter.seconds(step_of(meter, mlp, rows), 3) is None


def test_real_batches_are_made_fake(meter, mlp) -> None:
    placed = meter.place({"x": torch.ones(2, 3), "nested": [torch.ones(1)], "name": "kept"})

    assert placed["x"].fake_mode is placed["nested"][0].fake_mode
    assert placed["name"] == "kept"


def test_autocast_keeps_halves(meter, mlp, rows, step_of) -> None:
    plain = step_of(meter, mlp, rows)
    plain.setup = replace(plain.setup, precision=Precision(autocast=torch.bfloat16))

    reading = meter.memory(plain)

    kept = (ROWS * WIDTH + 2 * ROWS * HIDDEN + HIDDEN * WIDTH) * 2  # cast input, GELU's two, cast second weight
    if meter.profile.is_cuda:
        assert reading.activation_bytes == kept + ROWS * WIDTH * FLOAT + 512  # squared in float32
    else:
        assert reading.activation_bytes == kept + ROWS * WIDTH * 2 + 2


def test_bytes_moved_to_the_host_leave_the_device_alone(mlp, rows, step_of) -> None:
    def reading(name: str, spec: str):
        meter = SimulatedMeter(profiles.get(name))
        module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        step = step_of(meter, module, lambda: {"x": torch.randn(4096, WIDTH)})
        step.setup = schemes.build(spec).apply(step.setup)
        return meter.memory(step)

    on_card = {spec: reading("cuda-16gib", spec).activation_bytes for spec in ("exact", "offload")}
    on_cpu = {spec: reading("cpu", spec).activation_bytes for spec in ("exact", "offload")}

    assert on_card["offload"] == 4096 * WIDTH * FLOAT + 512  # the output, which the loss saves outside the model
    assert on_card["exact"] == 4096 * (2 * HIDDEN + WIDTH) * FLOAT + 512
    assert on_cpu["offload"] == on_cpu["exact"]  # there is no other place
