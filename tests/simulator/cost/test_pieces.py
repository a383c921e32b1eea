"""A simulation runs one piece of a large tensor, and counts the operators of all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.methods.formats.optim.storage import CHUNK
from actbench.methods.randomized.ops.sketch import transforms
from actbench.ops.simulation import few_for_all, one_for_all, repeated_by
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.fake import fake_mode
from actbench.simulator.simulated import SimulatedMeter
from actbench.tools.calibrate.stopwatch import Stopwatch

ROWS, WIDTH = 300, 4096


class Model(nn.Module):
    """Saves a tensor of two pieces of fp8, and has a parameter of three chunks and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * CHUNK // WIDTH + 2, WIDTH))

    def forward(self, x):
        return torch.tanh(x * self.weight[:4].view(-1)).sum()


def setup(spec: str) -> TrainingSetup:
    exact = TrainingSetup(
        Model(), lambda module, batch: module(batch["x"]), lambda module: torch.optim.Adam(module.parameters())
    )
    return schemes.build(spec).apply(exact)


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(ROWS, 4 * WIDTH)}


def simulated(spec: str) -> Counter[str]:
    meter = SimulatedMeter(profiles.get("t4"))
    step = meter.adopt(setup(spec))
    with meter.active():
        meter.memory(TrainStep(step, meter.place(batch())))
    return Counter(each.work.label for each in meter.done)


def real(spec: str) -> Counter[str]:
    step = TrainStep(setup(spec), batch())
    step()
    return Counter(sample.work.label for sample in Stopwatch(torch.device("cpu")).time(step))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("spec", "label", "pieces"),
    [
        ("encode:fp8,on=activations", "_to_copy float32 to float8_e4m3fn", 2),
        ("encode:fp8,on=state", "_to_copy float32 to float8_e4m3fn", 2 * 4),
        ("encode:int:8,on=state", "groupquant_encode", 2 * 4),
        ("encode:int:8,on=state", "groupquant_decode", 2 * 4),
    ],
)
def test_as_many_operators_are_counted_as_a_real_step_runs(spec: str, label: str, pieces: int) -> None:
    counted, run = simulated(spec), real(spec)

    assert run[label] >= pieces
    assert counted[label] == run[label]


def test_only_a_fake_tensor_has_one_piece_for_all() -> None:
    told: list[int] = []

    class Told:
        def __init__(self, times: int) -> None:
            told.append(times)

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    with repeated_by(Told):
        assert list(one_for_all("abc", of=torch.ones(1))) == ["a", "b", "c"]
        assert told == []
        with fake_mode():
            fake = torch.ones(1)
        assert list(one_for_all("abc", of=fake)) == ["a"]
        assert list(one_for_all("", of=fake)) == []
    assert told == [3]
    assert list(one_for_all("abc", of=fake)) == ["a"]


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_three_pieces_of_a_sketch_need_and_count_what_all_of_them_do(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(pieces):
        ran: list[int] = []

        def counted(starts, of):
            for start in pieces(starts, of):
                ran.append(start)
                yield start

        monkeypatch.setattr(transforms, "few_for_all", counted)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        exact = TrainingSetup(
            model,
            lambda module, batch: module(batch["x"]).sum(),
            lambda module: torch.optim.SGD(module.parameters()),
        )
        meter = SimulatedMeter(profiles.get("t4"))
        step = meter.adopt(schemes.build(f"randomized:0.2,sketch={kind}").apply(exact))
        with meter.active():
            reading = meter.memory(TrainStep(step, meter.place({"x": torch.ones(ROWS * 10, 64)})))
        return reading, Counter(each.work.label for each in meter.done), len(ran)

    monkeypatch.setattr(transforms, "PIECE_BYTES", transforms.PIECE_BYTES // 32)
    few, counted, ran = read(few_for_all)
    whole, all_counted, all_ran = read(lambda starts, of: iter(starts))

    assert ran < all_ran
    assert counted == all_counted
    assert (few.peak_bytes, few.reserved_bytes) == (whole.peak_bytes, whole.reserved_bytes)
    assert few.estimated.step_seconds == pytest.approx(whole.estimated.step_seconds)
