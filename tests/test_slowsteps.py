from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from actbench import slowsteps
from actbench.measuring.inspection import trace
from actbench.measuring.meters import MemoryReading
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

STEPS = 50


class Clock:
    """Each look takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for position in range(STEPS):
            state = torch.tanh(self.change(state) + x[:, position])
        return state[:, None].expand_as(x)


def setup_of(module: nn.Module) -> TrainingSetup:
    return TrainingSetup(
        module=module,
        loss=lambda module, batch: module(batch["x"]).sum(),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


def told_of(seconds: float, *, traces: int = 0, steps: int = 1) -> list[str]:
    """Return what is told of simulated steps of two loops, where an operator takes so many seconds."""
    told: list[str] = []
    meter = SimulatedMeter(profiles.get("cpu"))
    setup = meter.adopt(setup_of(nn.Sequential(Recurrent(), Recurrent())))
    batch = meter.place({"x": torch.ones(2, STEPS, 4)})
    with slowsteps.report_to(told.append, Clock(seconds)):
        for _ in range(traces):
            trace(setup, lambda: batch)
        for _ in range(steps):
            with meter.active():
                step = TrainStep(setup, batch)
            meter.memory(step)
    return told


def test_a_short_step_tells_nothing() -> None:
    assert told_of(1e-9) == []


def test_a_loop_is_told_after_ten_seconds_and_when_its_time_has_doubled() -> None:
    first, *later = told_of(1 / 16)

    assert re.match(r"a simulated step takes long: \d+ operators ran in 10 s, most of them in ", first)
    assert "Recurrent.forward (test_slowsteps.py)" in first
    assert re.search(r"at least 20 s in all, and about 40 s if the layers that are left are like", first)
    assert "--sequence-length" in first
    assert all(text.startswith("the simulated step goes on: ") for text in later)
    assert [re.findall(r"operators ran in ([\d.]+) s", text)[0] for text in later[:2]] == ["20", "40"]


def test_a_later_step_is_told_to_take_as_long_as_the_one_before() -> None:
    told = told_of(1 / 16, steps=2)

    later = next(text for text in told if "about as long as the step before" in text)
    assert "operators ran in 10 s" in later


def test_a_step_after_a_trace_is_told_to_take_twice_its_forward_pass() -> None:
    told = told_of(1 / 16, traces=1)

    assert told[0].startswith("a simulated forward pass takes long")
    assert "at least 10 s in all" in told[0]
    step = next(text for text in told if "like the one before" in text)
    assert re.match(r"a simulated step takes long: .*at least 20 s in all, and about [\dm ]+s ", step)


def test_listening_changes_no_bytes() -> None:
    def read() -> MemoryReading:
        meter = SimulatedMeter(profiles.get("cpu"))
        setup = meter.adopt(setup_of(Recurrent()))
        with meter.active():
            step = TrainStep(setup, meter.place({"x": torch.ones(2, STEPS, 4)}))
        return meter.memory(step)

    with slowsteps.report_to(lambda text: None):
        followed = read()
    assert followed == read()
