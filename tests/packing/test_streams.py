from __future__ import annotations

import contextlib

import pytest
import torch

from actbench.ops import hostmemory
from actbench.packing import hostoffload as ours
from actbench.packing.hostoffload import AtOnce, OnTheSide

CPU = torch.device("cpu")


def test_copies_at_once_are_marked_and_equal():
    tensors = torch.randn(3), torch.arange(4, dtype=torch.int32)
    away = AtOnce(CPU).away(tensors)
    back = AtOnce(CPU).back(away.tensors)
    back.settle()

    assert all(tensor.untyped_storage() in hostmemory.NOTED for tensor in away.tensors)
    assert not any(tensor.untyped_storage() in hostmemory.NOTED for tensor in back.tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back.tensors, strict=True))


class StandIn:
    """A CUDA stream, or an event, that notes what is asked of it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        return StandIn(f"event of {self.name}", self.log)

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def streams(monkeypatch):
    """Let streams be stand-ins; gives the log of what happens on them."""
    log: list[str] = []
    current = [StandIn("computing", log)]

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream)
        yield
        current.pop()

    def moved(tensor):
        log.append(f"{current[-1].name} copies")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: StandIn("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(ours, "to_host", moved)
    return log


def test_copies_on_the_side_are_behind_what_was_computed_and_ahead_of_what_needs_them(streams):
    side = OnTheSide(CPU)
    away = side.away((torch.ones(3), torch.ones(2)))
    assert streams == ["side waits for computing", "side copies", "side copies"]
    streams.clear()
    away.settle()
    assert streams == ["computing waits for event of side"]
    streams.clear()
    back = side.back(away.tensors)
    assert streams == ["side waits for computing"]
    back.settle()

    assert streams == ["side waits for computing", "computing waits for event of side"]
    assert [tensor.tolist() for tensor in back.tensors] == [[1, 1, 1], [1, 1]]


def test_a_stream_that_did_not_ask_waits_too(streams, monkeypatch):
    """Backward may run on another stream than the one on which a tensor was fetched ahead."""
    back = OnTheSide(CPU).back((torch.ones(3),))
    other, recorded = StandIn("other", streams), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream.name))
    streams.clear()
    back.settle()

    assert streams == ["computing waits for event of side", "other waits for event of side"]
    assert recorded == ["other"]
