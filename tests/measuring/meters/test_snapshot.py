"""What torch's memory visualiser is given of a step: texts and numbers alone, and allocations that are possible."""

from __future__ import annotations

import pickle
import pickletools
import random
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from actbench.measuring.meters import pickled
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.peak import alive
from actbench.measuring.meters.snapshot import snapshot_of
from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

# What the visualiser's own reader of pickles knows, beside numbers and texts: lists, dicts, tuples and its memory.
KNOWN = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def played(snapshot: dict[str, Any]) -> tuple[dict[int, int], int]:
    """Play the trace; return what is alive at its end by address, and the most bytes alive; no two may overlap."""
    live: dict[int, int] = {}
    peak = 0
    segment = snapshot["segments"][0]
    first, last = segment["address"], segment["address"] + segment["total_size"]
    for entry in snapshot["device_traces"][0]:
        start, end = entry["addr"], entry["addr"] + entry["size"]
        if entry["action"] == "alloc":
            assert first <= start < end <= last
            assert all(end <= other or other + size <= start for other, size in live.items())
            live[start] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(start) == entry["size"]
        peak = max(peak, sum(live.values()))
    return live, peak


@pytest.fixture
def made() -> StepEvents:
    """A step of 500 random events of 40 storages, which are freed, grow and shrink; the first 10 are there before."""
    draw = random.Random(0)
    events = [(name, draw.randrange(1, 5000)) for name in range(10)]
    events += [(draw.randrange(40), draw.choice([0, draw.randrange(1, 5000)])) for _ in range(500)]
    live = [sum(alive(events[:at]).values()) for at in range(10, len(events) + 1)]
    origins = {name: Origin(f"layer.{name % 3}", "aten::mm") for name in range(40)}
    peak_at = 10 + max(range(len(live)), key=live.__getitem__)
    return StepEvents(events, 10, peak_at, [("forward", 10)], dict.fromkeys(range(10), "weights"), origins)


def test_the_trace_plays_the_events(made: StepEvents) -> None:
    snapshot = snapshot_of(made)
    live, peak = played(snapshot)
    blocks = snapshot["segments"][0]["blocks"]

    assert peak == made.peak_bytes
    assert sorted(live.values()) == sorted(alive(made.events).values())
    assert {each["address"]: each["size"] for each in blocks if each["state"] == "active_allocated"} == live
    assert sum(each["size"] for each in blocks) == snapshot["segments"][0]["total_size"]


def test_the_visualiser_can_read_it(made: StepEvents) -> None:
    written = pickled(snapshot_of(made))
    operators = list(pickletools.genops(written))

    assert {operator.name for operator, _, _ in operators} <= KNOWN
    assert operators[0][1] == 4
    assert pickle.loads(written) == snapshot_of(made)


def test_torch_reads_it(made: StepEvents) -> None:
    snapshot = snapshot_of(made)

    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    assert _memory_viz.segsum(snapshot).startswith("Summary of segments")
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)


def test_categories_have_one_that_is_unknown(made: StepEvents) -> None:
    """The visualiser adds that one by a method that is not there, and then shows nothing."""
    found = {entry["category"] for entry in snapshot_of(made)["device_traces"][0]}

    assert found == {"unknown", "weights", "temporaries"}


def test_frames_say_module_operator_and_kind(made: StepEvents) -> None:
    allocations = [entry for entry in snapshot_of(made)["device_traces"][0] if entry["action"] == "alloc"]
    lines = [f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in allocations[0]["frames"]]

    assert lines == ["layer.0:0:aten::mm", "kind:0:weights"]


@pytest.mark.parametrize("meter", ["cpu", "cuda-16gib"])
def test_its_peak_is_that_of_the_meter(meter: str, mlp, rows, step_of) -> None:
    used = CpuMeter() if meter == "cpu" else SimulatedMeter(profiles.get(meter))
    torch.manual_seed(0)
    step = step_of(used, mlp, rows)

    _, peak = played(used.snapshot(step))

    assert peak == used.memory(step_of(used, mlp, rows)).peak_bytes
