"""What runs inside of a simulation believes in the card, and is counted as on one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes
from actbench.errors import MeasurementError, UsageError
from actbench.model.measured import Measurement
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.script.simulation import Simulation
from actbench.units import MIB

WIDTH, ROWS = 512, 64
FLOAT = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


WEIGHTS = 2 * (WIDTH * WIDTH + WIDTH) * FLOAT


def train(steps: int = 20, device: str = "cuda") -> nn.Module:
    """Train as people do."""
    module = model().to(device)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH)
        x = x.to(device, non_blocking=True)
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def test_a_loop_ends_when_two_steps_are_alike_and_is_measured() -> None:
    with actbench.simulate("rtx-4090") as card:
        train()

    found = card.measurement
    assert len(card.steps.done) == 3
    assert found.weights_bytes == WEIGHTS
    assert found.gradients_bytes == WEIGHTS
    assert found.optimizer_bytes == 2 * WEIGHTS  # the counters of steps are in host memory
    assert found.peak_bytes == card.peak_bytes == card.timeline().peak_bytes
    assert found.peak_parts is not None
    assert sum(found.peak_parts.model_dump().values()) == found.peak_bytes
    assert found.phase_peaks is not None
    assert max(found.phase_peaks.model_dump().values()) == found.peak_bytes
    assert found.reserved_bytes is not None
    assert found.reserved_bytes >= found.peak_bytes
    assert found.estimated is not None
    assert found.estimated.step_seconds > 0
    assert "weights" in card.table()


def test_a_step_is_that_of_measure() -> None:
    """The loop above, as actbench measure runs it."""
    meter = SimulatedMeter(profiles.get("rtx-4090"))
    setup = TrainingSetup(
        meter.adopt(TrainingSetup(model())).module,
        loss=lambda module, batch: module(batch["x"]).square().mean(),
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters()),
    )
    with meter.active():
        step = TrainStep(setup, meter.place({"x": torch.randn(ROWS, WIDTH)}))
    reading = meter.memory(step)

    with actbench.simulate("rtx-4090") as card:
        train()

    # the loop holds the loss of the step before, of one block, until the next loss is there
    assert card.peak_bytes - reading.peak_bytes in (0, 512)
    assert card.measurement.activation_bytes - reading.activation_bytes in (-512, 0, 512)


def test_everything_is_as_before_afterwards() -> None:
    before = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "device", "data", "type")}
    functions = {name: getattr(torch, name) for name in ("zeros", "empty_like", "tensor", "set_default_device")}

    with actbench.simulate("rtx-4090"):
        train()

    assert {name: vars(torch.Tensor).get(name) for name in before} == before
    assert {name: getattr(torch, name) for name in functions} == functions
    assert type(torch.zeros(1000, 1000)) is torch.Tensor
    assert torch.zeros(2).device.type == "cpu"
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_parameter_registration_hooks


def test_tensors_say_where_they_are() -> None:
    with Simulation(profiles.get("rtx-4090")):
        host, card = torch.zeros(3), torch.zeros(3, device="cuda")
        large = torch.zeros(1000, 1000)
        moved = large.cuda()
        back = moved.cpu()

        assert (host.device.type, large.device.type, back.device.type) == ("cpu", "cpu", "cpu")
        assert card.device == moved.device == torch.device("cuda", 0)
        assert (card + 1).device.type == "cuda"
        assert (moved.is_cuda, moved.is_cpu, moved.get_device()) == (True, False, 0)
        assert (large.is_cuda, large.is_cpu, large.get_device()) == (False, True, -1)
        assert torch.zeros_like(moved).is_cuda
        assert moved.new_zeros(3).is_cuda
        assert torch.arange(4, device=moved.device).tolist() == [0, 1, 2, 3]
        assert card.type() == "torch.cuda.FloatTensor"


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    "to_card",
    [
        lambda x: x.cuda(),
        lambda x: x.to("cuda"),
        lambda x: x.to("cuda:0", non_blocking=True),
        lambda x: x.to(torch.device("cuda"), torch.float32),
        lambda x: x.to(device="cuda", dtype=torch.float32, copy=True),
        lambda x: x.to(0),
        lambda x: x.type_as(torch.empty(1, device="cuda")),
        lambda x: x.to(torch.empty(1, device="cuda")),
        lambda x: torch.empty_like(x, device="cuda").copy_(x),
    ],
)
def test_what_is_moved_to_the_card_is_counted_there(to_card) -> None:  # type: ignore[no-untyped-def]
    with Simulation(profiles.get("rtx-4090")):
        x = torch.zeros(1000, 1024)
        assert torch.cuda.memory_allocated() == 0

        moved = to_card(x)
        gc.collect()

        assert torch.cuda.memory_allocated() == moved.nbytes
        assert moved.to("cuda") is moved
        del moved
        assert torch.cuda.memory_allocated() == 0


def test_the_numbers_of_the_card_are_the_simulated_ones() -> None:
    with Simulation(profiles.get("rtx-4090")):
        x = torch.zeros(10 * MIB // FLOAT, device="cuda")
        y = torch.zeros(30 * MIB // FLOAT, device="cuda")
        del y

        assert torch.cuda.memory_allocated() == x.nbytes
        assert torch.cuda.max_memory_allocated() == 40 * MIB
        assert torch.cuda.memory_reserved() == 40 * MIB
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == x.nbytes
        assert torch.cuda.memory_reserved() == 10 * MIB
        free, total = torch.cuda.mem_get_info()
        assert total - free == 10 * MIB
        assert "10240 KiB" in torch.cuda.memory_summary()


def test_modules_moved_after_their_optimizer_was_made_stay_its_own() -> None:
    with Simulation(profiles.get("rtx-4090")):
        module = model()
        optimizer = torch.optim.SGD(module.parameters())
        module.cuda()

        assert all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
        assert torch.cuda.memory_allocated() == WEIGHTS


@pytest.mark.slow
def test_tied_parameters_stay_tied() -> None:
    with Simulation(profiles.get("rtx-4090")):
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        shared = nn.Parameter(torch.zeros(4))
        first.extra, second.extra = shared, shared

        assert second.weight is first.weight
        assert second.extra is first.extra
        assert nn.ModuleList([first, second]).cuda()[1].weight is first.weight


@pytest.mark.slow
def test_a_step_without_an_end_is_told() -> None:
    with actbench.simulate("rtx-4090") as card:
        model().cuda()(torch.zeros(2, WIDTH, device="cuda")).sum().backward()

    with pytest.raises(MeasurementError, match="no training step ended"):
        _ = card.peak_bytes


def test_there_is_no_such_card() -> None:
    with pytest.raises(UsageError, match="rtx-4090"):
        actbench.simulate("rtx-4091")


def test_errors_of_the_loop_pass() -> None:
    with pytest.raises(ZeroDivisionError), actbench.simulate("rtx-4090"):
        _ = 1 / 0

    assert type(torch.zeros(1000, 1000)) is torch.Tensor


def test_memory_runs_out_where_it_would() -> None:
    """A script that tries again with half of its batch finds the batch that fits."""
    tried = []
    with actbench.simulate("rtx-4090", memory_limit_bytes=64 * MIB, raise_oom=True) as card:
        module = model().cuda()
        optimizer = torch.optim.SGD(module.parameters())
        rows = 2**16
        while True:
            try:
                for _ in range(9):
                    module(torch.randn(rows, WIDTH, device="cuda")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except torch.OutOfMemoryError as error:
                tried.append((rows, str(error)))
                optimizer.zero_grad()
                rows //= 2

    assert tried[0][0] == 2**16
    assert "rtx-4090" in tried[0][1]
    assert rows == tried[-1][0] // 2
    assert card.measurement.fits


@pytest.mark.slow
def test_the_first_step_which_is_without_the_scheme_is_not_counted() -> None:
    def loop() -> None:
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
        while True:
            blocks(torch.randn(64 * ROWS, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def needed(scheme: str, **options: object) -> Measurement:
        with Simulation(profiles.get("rtx-4090"), scheme=schemes.build(scheme), **options) as card:  # type: ignore[arg-type]
            loop()
        return card.measurement

    exact, offloaded = needed("exact"), needed("offload")
    assert offloaded.reserved_bytes is not None
    assert offloaded.peak_bytes <= offloaded.reserved_bytes < exact.peak_bytes
    limited = needed("offload", memory_limit_bytes=offloaded.reserved_bytes, raise_oom=True)
    assert limited.fits
    assert limited.peak_bytes == offloaded.peak_bytes


@pytest.mark.slow
def test_recomputed_blocks_run_on_the_card() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(x.shape[0], 1, device=x.device)
            return checkpoint(lambda y: self.inner(y) * mask, x, use_reentrant=False)

    peaks = []
    for use in (False, True):
        with actbench.simulate("rtx-4090") as card:
            module = nn.Sequential(*([Block() for _ in range(4)] if use else [model() for _ in range(4)])).cuda()
            optimizer = torch.optim.SGD(module.parameters())
            for _ in range(9):
                module(torch.randn(4096, WIDTH, device="cuda", requires_grad=True)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(card.measurement.activation_bytes)

    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.slow
def test_nothing_is_left_alive() -> None:
    held = []
    with actbench.simulate("rtx-4090"):
        module = train(steps=2)
        held.append(weakref.ref(module))
        del module
    gc.collect()

    assert held[0]() is None


@pytest.mark.slow
def test_accumulated_micro_batches_are_one_step() -> None:
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        optimizer = torch.optim.SGD(module.parameters())
        for number in range(1, 100):
            module(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert [len(step.forwards) for step in card.steps.done] == [4, 4, 4]
    assert card.measurement.gradients_bytes == WEIGHTS


@pytest.mark.slow
def test_two_optimizers_that_take_turns_are_one_step() -> None:
    with actbench.simulate("rtx-4090") as card:
        first, second = model().cuda(), model().cuda()
        optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
        for _ in range(20):
            for module, optimizer in zip((first, second), optimizers, strict=True):
                module(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    found = card.measurement
    assert found.weights_bytes == 2 * WEIGHTS
    assert found.optimizer_bytes == 4 * WEIGHTS
    assert [len(step.forwards) for step in card.steps.done[1:]] == [2, 2]
    assert found.peak_parts is not None
    assert found.peak_parts.optimizer_bytes == 4 * WEIGHTS


@pytest.mark.slow
def test_an_optimizer_that_takes_over_is_the_one_that_steps() -> None:
    """A head is trained for two steps, and then everything."""
    with actbench.simulate("rtx-4090") as card:
        module = model().cuda()
        stages = [(2, torch.optim.Adam(module[2].parameters())), (100, torch.optim.Adam(module.parameters()))]
        for steps, optimizer in stages:
            for _ in range(steps):
                module(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
                optimizer.step()
                module.zero_grad()

    assert card.measurement.optimizer_bytes == 2 * WEIGHTS
