"""The way of one saved tensor, from the call that packs it to the operator that encodes it, and back."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from actbench import schemes
from actbench.setup import TrainingSetup

MOST_CALLS = 15


def rooms_below(frame: FrameType | None, first: tuple[str, ...]) -> list[str]:
    """Return the rooms of the calls from the outermost ``first`` function down to a frame."""
    calls: list[tuple[str, str]] = []
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.rpartition("/actbench/")
        calls += [(path.split("/")[0], frame.f_code.co_name)] if inside else []
        frame = frame.f_back
    start = next((place for place in reversed(range(len(calls))) if calls[place][1] in first), -1)
    return [room for room, _ in reversed(calls[: start + 1])]


def ways(spec: str, first: tuple[str, ...], *, forward: bool) -> list[list[str]]:
    """Return the rooms of each call from a function to a kernel for the CPU, in one pass of a network."""
    network = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    setup = schemes.build(spec).apply(
        TrainingSetup(network, loss=lambda model, batch: model(batch["x"]).square().mean())
    )
    batch = {"x": torch.randn(64, 64, requires_grad=True)}
    setup.forward(batch).backward()  # type: ignore[no-untyped-call]
    found: list[list[str]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("/cpu.py", "/reference.py")):
            found.append(rooms_below(frame, first))

    loss = None if forward else setup.forward(batch)
    sys.setprofile(look)
    try:
        setup.forward(batch) if loss is None else loss.backward()  # type: ignore[no-untyped-call]
    finally:
        sys.setprofile(None)
    return [way for way in found if way]


@pytest.mark.parametrize("spec", ["actnn:L2", "gact:L2", "smaq,on=activations", "dropit:0.25"])
def test_the_way_into_a_codec_is_short_and_returns_to_no_room(spec: str) -> None:
    found = ways(spec, ("pack",), forward=True)

    assert found
    for way in found:
        assert len(way) <= MOST_CALLS
        rooms = [room for room, _ in itertools.groupby(way)]
        assert len(rooms) == len(set(rooms)), rooms


@pytest.mark.parametrize("spec", ["actnn:L2", "gact:L2", "smaq,on=activations", "dropit:0.25"])
def test_the_way_back_is_short_and_returns_to_no_room(spec: str) -> None:
    found = ways(spec, ("backward", "unpack"), forward=False)

    assert found
    for way in found:
        assert len(way) <= MOST_CALLS
        rooms = [room for room, _ in itertools.groupby(way)]
        assert len(rooms) == len(set(rooms)), rooms
