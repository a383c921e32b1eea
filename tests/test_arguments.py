"""Arguments of another type, and models that torch cannot walk through: refused in words by the whole public API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import actbench
from actbench.errors import ArgumentError, ModelError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU())


TAKING: dict[str, Callable[[Any], object]] = {
    "convert": lambda bad: actbench.convert(bad, "fewbit:3"),
    "convert, scheme": lambda bad: actbench.convert(model(), bad),
    "apply": lambda bad: actbench.apply(bad, "fewbit:3"),
    "apply, scheme": lambda bad: actbench.apply(actbench.TrainingSetup(model()), bad),
    "TrainingSetup": lambda bad: actbench.apply(actbench.TrainingSetup(bad), "fewbit:3"),
    "conversion_of": lambda bad: actbench.conversion_of(bad),
    "base_state_dict": lambda bad: actbench.base_state_dict(bad),
    "save_converted": lambda bad: actbench.save_converted(bad, "somewhere"),
    "save_converted, folder": lambda bad: actbench.save_converted(model(), bad),
    "load_converted": lambda bad: actbench.load_converted(bad),
    "Controller": lambda bad: actbench.Controller(bad),
    "TrainStep": lambda bad: actbench.TrainStep(bad),
    "measure": lambda bad: actbench.measure(bad),
    "fit": lambda bad: actbench.fit(bad, device_profile="rtx-4090"),
    "fit, device": lambda bad: actbench.fit("tiny-bert", device_profile=bad),
    "table": lambda bad: actbench.table(bad, 3),
    "table, bits": lambda bad: actbench.table("gelu", bad),
    "own_activation": lambda bad: actbench.own_activation(bad, lambda x: x),
    "simulate": lambda bad: actbench.simulate(bad),
}


@pytest.mark.parametrize("bad", [None, [], object()], ids=["None", "list", "object"])
@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
def test_an_argument_of_another_type_is_refused_by_the_name_of_its_type(
    take: Callable[[Any], object], bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=rf" takes .*, found {type(bad).__name__}$") as refused:
        take(bad)

    assert isinstance(refused.value, TypeError | actbench.UsageError)
    assert list(tmp_path.iterdir()) == []


def around() -> nn.Module:
    held = model()
    held.add_module("me", held)
    return held


def inside() -> nn.Module:
    held = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    held[0].parent = held
    return held


def deep() -> nn.Module:
    held = model()
    for _ in range(3000):
        held = nn.Sequential(held)
    return held


ENDLESS = {
    "around": (around, "^me of this Sequential contains itself"),
    "inside": (inside, r"^0\.parent of this Sequential contains itself"),
    "deep": (deep, "^this Sequential nests modules more than 200 deep"),
}
WALKING: dict[str, Callable[[nn.Module], object]] = {
    name: TAKING[name]
    for name in ("convert", "TrainingSetup", "conversion_of", "base_state_dict", "save_converted", "Controller")
}


@pytest.mark.parametrize("walk", WALKING.values(), ids=WALKING)
@pytest.mark.parametrize(("make", "why"), ENDLESS.values(), ids=ENDLESS)
def test_a_model_that_torch_cannot_walk_through_is_refused(
    walk: Callable[[nn.Module], object], make: Callable[[], nn.Module], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        walk(make())


def test_a_module_that_is_shared_is_not_endless() -> None:
    shared = nn.Linear(4, 4)
    held = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.GELU()), shared)

    assert actbench.conversion_of(actbench.convert(held, "fewbit:3")) is not None
