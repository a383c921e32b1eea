from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actbench.errors import MeasurementError, OutOfMemoryError
from actbench.measuring.meters import cudameter, tracedstep
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.cudameter import CudaMeter, _set_allocator, profile_of_device
from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.trace import UNSEEN, AllocationTrace
from actbench.measuring.meters.watch import Watch
from actbench.model.timeline import Timeline
from actbench.ops import hostmemory
from actbench.scheme.microbatches import MicroBatching
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.simulated import SimulatedMeter
from actbench.units import GIB, MIB

FLOAT = 4
ROWS, WIDTH, HIDDEN = 64, 128, 512  # of the fixtures ``mlp`` and ``rows``


def test_without_a_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(MeasurementError, match=r"no CUDA device here; use --meter simulated.*actbench doctor"):
        CudaMeter()


def test_a_setup_can_ask_for_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    setup = TrainingSetup(nn.Linear(WIDTH, WIDTH))

    _set_allocator(setup)
    assert asked == []
    _set_allocator(replace(setup, expandable_segments=True))

    assert asked == ["expandable_segments:True"]


@pytest.mark.gpu
def test_the_peak_is_the_simulated_one(step_of) -> None:
    """Both measure one MLP; the difference is what the allocator does not cut off from blocks, less than 1 MiB each."""
    readings = []
    for meter in (CudaMeter(), SimulatedMeter(profile_of_device())):
        module = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        readings.append(meter.memory(step_of(meter, module, lambda: {"x": torch.randn(2**16, WIDTH)})))
    measured, simulated = readings

    assert measured.weights_bytes == simulated.weights_bytes
    assert measured.gradients_bytes == simulated.gradients_bytes
    assert measured.optimizer_bytes == simulated.optimizer_bytes
    assert measured.activation_bytes == simulated.activation_bytes
    assert 0 <= measured.peak_bytes - simulated.peak_bytes <= 0.01 * measured.peak_bytes
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes


@pytest.mark.gpu
def test_the_limit_is_hard(step_of) -> None:
    meter = CudaMeter(1 * GIB)
    module = nn.Linear(WIDTH, WIDTH)

    with pytest.raises(OutOfMemoryError, match=r"may use 1\.00 GiB"):
        meter.memory(step_of(meter, module, lambda: {"x": torch.randn(2**22, WIDTH)}))
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@pytest.mark.gpu
def test_every_step_is_timed(mlp, rows, step_of) -> None:
    meter = CudaMeter()

    seconds = meter.seconds(step_of(meter, mlp, rows), 3)

    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)


class Counters:
    """Stands for torch's counters of memory: each part of a step has its own peak."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: list[int], peaks: list[int], reserved: list[int]):
        self.peaks, self.reserved, self.allocated = peaks, reserved, allocated
        self.part = 0
        for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cudameter, "_process_bytes", lambda: None)

    def memory_allocated(self) -> int:
        return self.allocated.pop(0) if len(self.allocated) > 1 else self.allocated[0]

    def max_memory_allocated(self) -> int:
        return self.peaks[self.part]

    def max_memory_reserved(self) -> int:
        return self.reserved[self.part]

    def reset_peak_memory_stats(self) -> None:
        self.part += 1


def on_the_cpu(rows: int = 2, parts: int = 1) -> TrainStep:
    def loss(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return module(batch["x"]).sum()

    setup = TrainingSetup(nn.Linear(8, 4, bias=False), loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    setup = replace(setup, micro_batching=MicroBatching(parts))
    return TrainStep(setup, {"x": torch.randn(rows, 8)})


@pytest.mark.parametrize(
    ("peaks", "phase"), [([900, 500, 600], "forward"), ([500, 900, 600], "backward"), ([500, 600, 900], "optimizer")]
)
def test_the_peak_is_that_of_the_part_with_the_highest(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int], phase: str
) -> None:
    Counters(monkeypatch, [200, 350], peaks, [1000, 3000, 2000])

    reading = cudameter._read(on_the_cpu(), None)

    assert (reading.peak_bytes, reading.peak_phase) == (900, phase)
    assert (reading.reserved_bytes, reading.activation_bytes) == (3000, 150)
    assert (reading.peak_parts is None) == (phase != "optimizer")


def test_activations_are_those_of_a_pass_alone_if_there_was_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350], [900, 500, 600], [1000, 3000, 2000])

    assert cudameter._read(on_the_cpu(), (1000, 1042)).activation_bytes == 42


def test_what_reference_cycles_hold_after_a_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350, 800 * MIB, 300 * MIB], [900 * MIB] * 3, [1000 * MIB] * 3)
    step = on_the_cpu()

    cudameter._read(step, None)

    (note,) = step.notes
    assert "500.00 MiB" in note
    assert "save_for_backward" in note


@pytest.mark.parametrize(
    ("peaks", "phase"),
    [
        ([500, 600, 900, 700, 800], "forward"),
        ([500, 900, 600, 700, 800], "backward"),
        ([500, 600, 700, 900, 800], "backward"),
        ([500, 600, 700, 800, 900], "optimizer"),
    ],
)
def test_a_later_micro_batch_has_a_forward_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch, peaks: list[int], phase: str
) -> None:
    Counters(monkeypatch, [200, 350], peaks, [1000, 1000, 1000, 3000, 2000])

    reading = cudameter._read(on_the_cpu(rows=4, parts=2), None)

    assert (reading.peak_bytes, reading.peak_phase, reading.reserved_bytes) == (900, phase, 3000)
    assert reading.activation_bytes == 150


def test_what_fills_the_peak_is_known_in_the_step_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350], [500, 600, 900], [1, 1, 1])
    weights = 8 * 4 * 4

    parts = cudameter._read(on_the_cpu(), None).peak_parts

    assert parts is not None
    assert parts.model_dump() == {
        "weights_bytes": weights,
        "gradients_bytes": weights,
        "optimizer_bytes": 0,
        "activation_bytes": 0,
        "engine_bytes": 0,
        "cache_bytes": 0,
        "batch_bytes": 200 - weights,
        "kept_bytes": 0,
        "communication_bytes": 0,
        "temporary_bytes": 900 - 200 - weights,
    }


def test_gradients_that_never_are_there_together_leave_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters(monkeypatch, [200, 350], [100, 150, 210], [1, 1, 1])

    assert cudameter._read(on_the_cpu(), None).peak_parts is None


class OfTheCpu(AllocationTrace):
    """Stands for a trace of a CUDA device's allocator: that of the CPU."""

    def __init__(self, device: str, made_node: Callable[[int], str]) -> None:
        assert device == "cuda"
        super().__init__("cpu", made_node)


def settle(step: TrainStep) -> None:
    """Run the step once, and no forward pass alone."""
    step()


def watched(monkeypatch: pytest.MonkeyPatch, before_bytes: int, peak_bytes: int) -> tuple[MemoryReading, Timeline]:
    """Read a step whose allocator is the CPU's, by counters that say this."""
    Counters(monkeypatch, [before_bytes, before_bytes, before_bytes], [0, 0, peak_bytes], [1, 1, 1])
    monkeypatch.setattr(cudameter, "AllocationTrace", OfTheCpu)
    monkeypatch.setattr(hostmemory, "NOTED", weakref.WeakSet())  # other tests may have left some
    monkeypatch.setattr(cudameter, "_settle", settle)
    step = on_the_cpu()
    held = [replace(each, device="cuda") for each in tracedstep.held_before(step)]
    monkeypatch.setattr(tracedstep, "held_before", lambda step: held)
    watch = Watch(step)
    return cudameter._watched(step, watch), watch.timeline()


OTHERS = 1000  # bytes of something that was allocated before
WEIGHTS, BATCH = 8 * 4 * FLOAT, 2 * 8 * FLOAT  # of ``on_the_cpu``


def peak_on_the_cpu() -> int:
    return CpuMeter().memory(on_the_cpu()).peak_bytes


def test_who_holds_what_adds_up_to_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_on_the_cpu() + OTHERS

    reading, timeline = watched(monkeypatch, WEIGHTS + BATCH + OTHERS, peak)
    held = {(each.module, each.kind, each.operator): each.held_bytes for each in timeline.holders}

    assert sum(held.values()) == timeline.peak_bytes == reading.peak_bytes == peak
    assert held["", "weights", "parameter"] == WEIGHTS
    assert held["<batch>", "batch", "x"] == BATCH
    assert held["<other>", "batch", "allocated before the step"] == OTHERS


def test_sums_that_differ_from_the_counters_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_on_the_cpu() + OTHERS

    with pytest.raises(MeasurementError, match=rf"{peak + 1:,} bytes.*add up to {peak:,}.*without --timeline"):
        watched(monkeypatch, WEIGHTS + BATCH + OTHERS, peak + 1)


def test_what_schemes_move_to_the_host_is_known_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_on_the_cpu()
    monkeypatch.setattr(hostmemory, "noted_bytes", iter([0, 0, 64, 0, 0]).__next__)

    _, timeline = watched(monkeypatch, WEIGHTS + BATCH, peak)

    assert max(timeline.held_bytes["host"]) == 64
    assert timeline.held_bytes["host"][0] == timeline.held_bytes["host"][-1] == 0


def told(
    name: str, device: str = "cuda", size: int = 0, address: int = 0, at: int = 0, total: int = 0
) -> SimpleNamespace:
    """Return an event as torch's profiler has it."""
    fields = SimpleNamespace(device=torch.device(device), alloc_size=size, ptr=address, total_allocated=total)
    return SimpleNamespace(name=name, extra_fields=fields, start_time_ns=at, parent=None)


def test_a_free_of_what_was_there_before_shrinks_what_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = AllocationTrace("cuda")
    events = [
        told("actbench.mark.begin"),
        told("[memory]", size=512, address=1, at=1, total=5632),
        told("[memory]", "cpu", size=64, address=7, at=2),
        told("[memory]", size=-2048, address=2, at=3, total=3584),
        told("[memory]", size=-512, address=1, at=4, total=3072),
        told("actbench.mark.end", at=5),
    ]
    monkeypatch.setattr(trace, "_events", lambda: events)

    trace._draw_curve()

    assert trace.events == [(0, 512), (UNSEEN, -2048), (0, 0)]
    assert trace.live_bytes("end") == -2048
    assert trace.peak_bytes("begin", "end") == 512


def test_a_free_that_the_profiler_misses_is_known_by_the_next_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two sizes are freed unseen; of one size the block is known, and of both together it is not."""
    trace = AllocationTrace("cuda")
    events = [
        told("actbench.mark.begin"),
        told("[memory]", size=512, address=1, at=1, total=1512),
        told("[memory]", size=1024, address=2, at=2, total=2536),
        told("[memory]", size=2048, address=3, at=3, total=2536 + 2048 - 1024),
        told("[memory]", size=512, address=4, at=4, total=1000 + 512),
        told("actbench.mark.end", at=5),
    ]
    monkeypatch.setattr(trace, "_events", lambda: events)

    trace._draw_curve()

    assert trace.events == [(0, 512), (1, 1024), (1, 0), (2, 2048), (UNSEEN, -2560), (3, 512)]
    assert trace.peak_bytes("begin", "end") == 512 + 2048
    assert trace.live_bytes("end") == 512


def test_a_snapshot_is_torchs_own_of_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *on, **how: said.append((on, how)))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"steps": steps, "recorded": len(said)})
    steps = 0

    def count(step: TrainStep) -> None:
        nonlocal steps
        steps += 1

    monkeypatch.setattr(TrainStep, "__call__", count)
    meter = object.__new__(CudaMeter)
    monkeypatch.setattr(CudaMeter, "active", lambda self, step=None: nullcontext())

    assert meter.snapshot(on_the_cpu()) == {"steps": 2, "recorded": 1}
    assert said == [((), {"stacks": "python", "clear_history": True}), ((None,), {})]


@pytest.mark.gpu
def test_who_holds_what_adds_up_on_a_device(mlp, rows, step_of) -> None:
    meter = CudaMeter()
    step = step_of(meter, mlp, rows)
    watch = Watch(step)

    reading = meter.memory(step, watch)
    held = [each.held_bytes for each in watch.timeline().holders if each.kind != "host"]

    assert sum(held) == reading.peak_bytes == meter.memory(step_of(meter, mlp, rows)).peak_bytes


@pytest.mark.gpu
def test_a_snapshot_of_a_device_has_a_trace(mlp, rows, step_of) -> None:
    meter = CudaMeter()

    found = meter.snapshot(step_of(meter, mlp, rows))

    assert any(entry["action"] == "alloc" for trace in found["device_traces"] for entry in trace)
