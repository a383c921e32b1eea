"""Which passes and updates of a loop are one step, and that a step is counted as on the card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlptraining import ROWS, WEIGHTS, WIDTH, model, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes
from actbench.errors import MeasurementError
from actbench.model.measured import Measurement
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.script.simulation import Simulation


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


@pytest.mark.slow
def test_a_step_without_an_end_is_told() -> None:
    with actbench.simulate("rtx-4090") as card:
        model().cuda()(torch.zeros(2, WIDTH, device="cuda")).sum().backward()

    with pytest.raises(MeasurementError, match="no training step ended"):
        _ = card.peak_bytes


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

    assert card.measurement.optimizer_bytes == 2 * WEIGHTS + 2 * WEIGHTS // 2  # that of the head is still there


def test_a_teacher_in_inference_mode_takes_what_it_takes_without_gradients() -> None:
    """In this mode torch hands over convolutions and norms whole, and not the operators that they are composed of."""

    def trained(without: Callable[[], Any]) -> Measurement:
        with Simulation(profiles.get("rtx-4090"), steps=2) as card:
            teacher = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 3)).cuda()
            student = nn.Conv2d(3, 8, 5).cuda()
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
            for _ in range(2):
                x = torch.randn(16, 3, 64, 64, device="cuda")
                with without():
                    wanted = teacher(x)
                nn.functional.mse_loss(student(x), wanted.clone()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return card.measurement

    inference, plain = trained(torch.inference_mode), trained(torch.no_grad)

    assert inference.peak_bytes == plain.peak_bytes
    assert inference.estimated is not None
    assert plain.estimated is not None
    assert inference.estimated.unknown == plain.estimated.unknown == ()
    assert inference.estimated.step_seconds == pytest.approx(plain.estimated.step_seconds, rel=1e-3)


def evaluated(without: Callable[[], Any]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the peak of layers whose operators are others on a card than on a CPU, and shapes of what they return."""
    with Simulation(profiles.get("rtx-4090")):
        layer = nn.LSTM(64, 128, num_layers=2, batch_first=True).cuda()
        x = torch.randn(4, 30, 64, device="cuda")
        with without():
            torch.cuda.reset_peak_memory_stats()
            packed = nn.utils.rnn.pack_padded_sequence(layer(x)[0], torch.tensor([30, 9, 4, 2]), batch_first=True)
            shares = packed.data.to(torch.bfloat16).softmax(-1, dtype=torch.float32)
            q = x.view(4, 30, 4, 16).transpose(1, 2)
            seen = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            scores = x.transpose(0, 1).log_softmax(-1)
            loss = nn.functional.ctc_loss(
                scores, torch.ones(4, 5, dtype=torch.long), torch.full((4,), 30), torch.full((4,), 5)
            )
            return torch.cuda.max_memory_allocated(), (tuple(shares.shape), tuple(seen.shape), tuple(loss.shape))


def test_in_inference_mode_operators_are_those_of_the_card() -> None:
    assert evaluated(torch.inference_mode) == evaluated(torch.no_grad)
