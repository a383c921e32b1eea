"""Micro-batches that are left out change nothing: the same measurement and the same events as when all of them run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from actbench.measuring import bench
from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.peak import Event
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.scheme.microbatches import MicroBatching
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles, simulated
from actbench.simulator.simulatedstep import MicroPasses

pytestmark = pytest.mark.usefixtures("operators_run_once")
SLOW = pytest.mark.sampled(slow=2)
LLAMA, ROBERTA, RESNET = "tiny-llama@num_hidden_layers=2", "tiny-roberta", "resnet-cifar"
PROFILES = ("cpu", "a100-40gb")
SCHEMES: dict[str, tuple[str, ...]] = {
    "exact": (LLAMA, ROBERTA, RESNET),
    "gact:L2": (LLAMA, ROBERTA),
    "actnn:L3": (LLAMA, ROBERTA),
    "checkpoint": (LLAMA,),
    "selective": (LLAMA,),
    "offload": (LLAMA, RESNET),
    "encode:bf16": (LLAMA, RESNET),
    "smaq": (LLAMA, RESNET),
    "fewbit:3": (ROBERTA,),
    "randomized:0.5": (ROBERTA,),
    "dropit:0.25": (LLAMA, RESNET),
    "velora:8": (LLAMA,),
    "wtacrs:0.5": (ROBERTA,),
    "mesa": (LLAMA,),
    "backrazor:0.25": (ROBERTA,),
    "float8": (LLAMA,),
    "coat": (LLAMA,),
    "division": (LLAMA, RESNET),
    "msln": (LLAMA,),
    "invact": (ROBERTA,),
    "lora:4": (LLAMA,),
    "hyclora:4": (LLAMA,),
    "prac:0.5": (ROBERTA,),
    "adam8bit": (LLAMA,),
    "optimizer_offload": (LLAMA,),
    "autocast:bfloat16": (LLAMA, ROBERTA),
    "qlora:4+checkpoint+chunked_loss:8": (LLAMA,),
}


def measured(case: Case, monkeypatch: pytest.MonkeyPatch, *, all_run: bool) -> tuple[Measurement, list[Event], int]:
    """Return what a case measures, its events with names in the order in which they appear, and the passes run."""
    runs: list[list[Sequence[Event]]] = []
    passes = 0
    read, forward = simulated._read, TrainStep._forward

    def noted(*args: Any) -> Any:
        reading, run = read(*args)
        runs.append(run)
        return reading, run

    def counted(self: TrainStep, part: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(self, part)

    with monkeypatch.context() as patched:
        patched.setattr(simulated, "_read", noted)
        patched.setattr(TrainStep, "_forward", counted)
        if all_run:
            patched.setattr(simulated, "MicroPasses", lambda *args, **_: MicroPasses(*args, all_run=True))
        found = bench.Session(case).memory()
    names: dict[int, int] = {}
    return found, [(names.setdefault(name, len(names)), amount) for name, amount in chain(*runs[0])], passes


def in_order(events: Sequence[Event]) -> list[Event]:
    """Return events with those that are freed in a row sorted: autocast frees its copies of weights by address."""
    runs = groupby(events, lambda event: event[1] == 0)
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


def rows() -> list[Any]:
    fast = (("gact:L2", ROBERTA),)  # test_of_many_micro_batches_four_run has the exact model
    return [
        pytest.param(scheme, model, PROFILES[turn % 2], marks=() if (scheme, model) in fast else SLOW)
        for turn, (scheme, models) in enumerate(SCHEMES.items())
        for model in models
    ]


@pytest.mark.parametrize(("scheme", "model", "profile"), rows())
def test_left_out_micro_batches_are_as_those_that_run(
    scheme: str, model: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {} if model == RESNET else {"sequence_length": 16}
    case = Case(
        model=model,
        scheme="accumulate:8" if scheme == "exact" else f"accumulate:8+{scheme}",
        meter="simulated",
        device_profile=profile,
        batch_size=14,
        **sizes,
    )
    run = partial(measured, case, monkeypatch)
    (found, events, passes), (expected, all_events, all_passes) = run(all_run=False), run(all_run=True)

    assert all_passes == 8
    assert passes in (6, 7)  # six of two rows, of which one or two are left out, and two of one row
    assert found == expected
    assert in_order(events) == in_order(all_events)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_of_many_micro_batches_four_run(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        model=LLAMA,
        scheme="accumulate:24",
        meter="simulated",
        device_profile="rtx-4090",
        optimizer=optimizer,
        batch_size=24,
        sequence_length=8,
    )
    run = partial(measured, case, monkeypatch)
    (found, events, passes), (expected, all_events, all_passes) = run(all_run=False), run(all_run=True)

    assert (passes, all_passes) == (4, 24)
    assert found.estimated is not None
    assert found == expected
    assert events == all_events


def test_micro_batches_that_differ_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(100))
    draw = MicroPasses.turn

    def uneven(self: MicroPasses) -> None:
        draw(self)
        if next(turns) % 4 == 0:  # every other micro-batch holds something more
            self._tracker.add([torch.empty(64)])

    monkeypatch.setattr(MicroPasses, "turn", uneven)
    case = Case(
        model=LLAMA,
        scheme="accumulate:8",
        meter="simulated",
        device_profile="cpu",
        batch_size=8,
        sequence_length=8,
    )
    assert measured(case, monkeypatch, all_run=False)[2] == 8


class Holding(nn.Module):
    """A network that holds its last inner output: its first step is run and abandoned before the one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 10)
        self.inner: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.first(x).relu()
        return self.second(self.inner)


@pytest.mark.parametrize("profile", [pytest.param("cpu", marks=SLOW), "a100-40gb"])
def test_a_step_that_is_abandoned_leaves_nothing_of_what_was_left_out(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(make: Any) -> MemoryReading:
        monkeypatch.setattr(simulated, "MicroPasses", make)
        meter = simulated.SimulatedMeter(profiles.get(profile))
        setup = meter.adopt(
            TrainingSetup(
                module=Holding(),
                loss=lambda module, batch: module(batch["x"]).mean(),
                make_optimizer=lambda module: optim.SGD(module.parameters()),
                micro_batching=MicroBatching(32),
            )
        )
        with meter.active():
            step = TrainStep(setup, meter.place({"x": torch.randn(64, 64)}))
        return meter.memory(step)

    assert reading(MicroPasses) == reading(lambda *args, **_: MicroPasses(*args, all_run=True))
