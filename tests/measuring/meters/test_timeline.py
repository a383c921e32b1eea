"""The memory over a step: who holds what adds up to the peak that is reported, to the byte."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes, workload as workloads
from actbench.measuring.meters import Meter, Watch
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.peak import alive
from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.model.ledger import OUTSIDE
from actbench.model.measured import PeakParts
from actbench.model.records import Case
from actbench.model.timeline import HOLDERS, LINES, OPTIMIZER, OTHER, POINTS, Timeline
from actbench.packing.determinism import deterministic_bits
from actbench.scheme.conditions import Limits
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

pytestmark = pytest.mark.usefixtures("operators_run_once")
FLOAT, BLOCK = 4, 512
EXAMPLES = {
    "compile": "compile:0.5,backend=aot_eager_decomp_partition",
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "randomized": "randomized:0.5",
}
OF_OTHERS = ("channels_last", "liger")  # of pictures, and of Llamas
SPECS = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in OF_OTHERS]
QUICK = ("exact", "fewbit:3", "checkpoint", "accumulate", "optimizer_offload", "release")
METER_NAMES = ("cpu", "cuda-16gib")
LM_ONLY = ("chunked_loss", "division")
OF_BLOCKS = ("checkpoint", "selective")
PART_OF_KIND = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "saved": "activation_bytes",
    "packed": "activation_bytes",
    "batch": "batch_bytes",
    "kept": "kept_bytes",
    "temporary": "temporary_bytes",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.act, self.narrow = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.act(self.wide(x)))


class Mixed(nn.Module):
    """Convolutions, norms, linear layers and activations of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.first, self.second = Block(), Block()
        self.norm, self.gate, self.head = nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.stem(x).flatten(2)))
        return self.head(self.gate(self.norm(x)).mean(1))


def class_loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def mixed(meter: Meter) -> tuple[TrainingSetup, Batch]:
    setup = TrainingSetup(Mixed(), class_loss, lambda module: torch.optim.AdamW(module.parameters()))
    return meter.adopt(setup), {"x": torch.randn(16, 3, 16, 16), "y": torch.arange(16) % 10}


def gpt2(meter: Meter, spec: str = "exact") -> tuple[TrainingSetup, Batch]:
    model = "tiny-gpt2@activation_function=silu" if spec == "resilu2" else "tiny-gpt2"
    workload = workloads.load_workload(Case(model=model, batch_size=8, sequence_length=32))
    setup = meter.adopt(workload.setup(materialize=meter.materialize, seed=0))
    with meter.active():
        return setup, workload.batch(8, seed=0)


def meter_named(name: str, *, workspaces: bool = True) -> Meter:
    return CpuMeter() if name == "cpu" else SimulatedMeter(replace(profiles.get(name), workspaces=workspaces))


def read(meter: Meter, setup: TrainingSetup, batch: Batch) -> tuple[MemoryReading, Watch]:
    with meter.active():
        step = TrainStep(setup, meter.place(batch))
    watch = Watch(step)
    with deterministic_bits():
        return meter.memory(step, watch), watch


def cases() -> Iterator[Any]:
    """Yield each scheme on each model that it goes with, by one meter or the other; most are slow together."""
    for turn, spec in enumerate(SPECS):
        for place, model in enumerate(("gpt2", "mixed")):
            if spec in LM_ONLY and model == "mixed":
                continue
            is_quick = spec in QUICK and model == "mixed"
            for meter in METER_NAMES if spec in LM_ONLY else (METER_NAMES[(turn + place) % 2],):
                used = "cpu" if (schemes.build(spec).facet(Limits) or Limits()).untraceable else meter
                marks = () if is_quick else pytest.mark.sampled(slow=8)
                yield pytest.param(spec, model, used, id=f"{spec}-{model}-{used}", marks=marks)


@pytest.mark.parametrize(("spec", "model", "meter"), list(cases()))
def test_who_holds_what_adds_up_to_the_peak(spec: str, model: str, meter: str) -> None:
    used = meter_named(meter)
    setup, batch = gpt2(used, spec) if model == "gpt2" else mixed(used)
    scheme = schemes.build(f"{spec},blocks=Block" if model == "mixed" and spec in OF_BLOCKS else spec)
    reading, watch = read(used, scheme.apply(setup), batch)
    timeline = watch.timeline()
    held = Counter[str]()
    for holder in timeline.holders:
        held[holder.kind] += holder.held_bytes
    held.pop("host", None)

    assert held.total() == timeline.peak_bytes == max(timeline.totals) == reading.peak_bytes
    assert timeline.peak_phase == reading.peak_phase
    assert reading.peak_parts == parts_of(held)
    assert dict(zip(timeline.moments, timeline.totals, strict=True))[timeline.peak_event] == reading.peak_bytes


def parts_of(held: Counter[str]) -> PeakParts:
    sums = Counter[str]()
    for kind, amount in held.items():
        sums[PART_OF_KIND[kind]] += amount
    return PeakParts(**sums)


METERS = pytest.mark.parametrize("meter", METER_NAMES)


def watched(meter: str, spec: str = "exact") -> Watch:
    used = meter_named(meter)
    setup, batch = mixed(used)
    return read(used, schemes.build(spec).apply(setup), batch)[1]


def held_bytes(timeline: Timeline, **fields: str) -> int:
    """Return the bytes of the holders that have these fields."""
    found = (each for each in timeline.holders if fields.items() <= dict(each).items())
    return sum(each.held_bytes for each in found)


@METERS
def test_what_is_told_changes_nothing_of_what_is_read(meter: str) -> None:
    readings = []
    for told in (False, True):
        torch.manual_seed(0)
        used = meter_named(meter)
        setup, batch = mixed(used)
        with used.active():
            step = TrainStep(schemes.build("fewbit:3").apply(setup), used.place(batch))
        readings.append(used.memory(step, Watch(step) if told else None))

    assert replace(readings[0], memory_limit_bytes=None) == replace(readings[1], memory_limit_bytes=None)


@METERS
def test_weights_and_their_state_belong_to_the_module_of_the_parameter(meter: str) -> None:
    timeline = watched(meter).timeline()
    weight = 64 * 256 * FLOAT

    for module in ("first.wide", "second.wide"):
        assert held_bytes(timeline, kind="weights", module=module) == weight + 256 * FLOAT
        assert held_bytes(timeline, kind="optimizer", module=module) >= 2 * (weight + 256 * FLOAT)


@METERS
def test_the_backward_pass_runs_in_the_module_that_is_differentiated(meter: str) -> None:
    origins = watched(meter).read().origins.values()

    found = {origin.module for origin in origins if origin.operator == "aten::gelu_backward"}
    assert found == {"first.act", "second.act"}
    assert {origin.module for origin in origins if origin.operator == "aten::native_layer_norm_backward"} == {"norm"}
    assert {origin.module for origin in origins if origin.operator == "aten::convolution"} == {"stem.0"}


def test_the_loss_is_not_the_optimizers() -> None:
    origins = watched("cpu").read().origins.values()

    assert {origin.module for origin in origins if origin.operator == "aten::_log_softmax"} == {OUTSIDE}
    assert OPTIMIZER in {origin.module for origin in origins if origin.operator == "aten::sqrt"}


def copied(module: nn.Module, batch: Batch) -> Tensor:
    """Return a sum that torch makes of a copy in another type, inside the operator."""
    return module(batch["x"]).sum(dtype=torch.float64)


@pytest.mark.newer_torch("its profiler names the copy inside of the sum")
@METERS
def test_a_peak_inside_an_operator_is_held_by_the_operator(meter: str, step_of: Any) -> None:
    used = meter_named(meter, workspaces=False)  # that of a product is larger than the copy
    step = step_of(used, nn.Linear(8, 64), lambda: {"x": torch.randn(4096, 8)}, copied)
    watch = Watch(step)
    reading = used.memory(step, watch)
    timeline = watch.timeline()

    assert reading.peak_phase == "forward"
    held = held_bytes(timeline, kind="temporary", operator="aten::sum")
    assert 2 * FLOAT * 4096 * 64 <= held <= 2 * FLOAT * 4096 * 64 + 2 * BLOCK
    assert sum(each.held_bytes for each in timeline.holders if each.kind != "host") == reading.peak_bytes


@METERS
def test_packed_codes_are_a_kind_of_their_own(meter: str) -> None:
    elements = 2 * 16 * 16 * 256  # of both GELU layers, at 3 bits

    assert "packed" not in watched(meter).timeline().held_bytes
    packed = max(watched(meter, "fewbit:3,functions=gelu").timeline().held_bytes["packed"])
    assert elements * 3 / 8 <= packed <= elements * 3 / 8 * 1.02 + 4 * BLOCK


@pytest.mark.parametrize(("spec", "module"), [("offload", None), ("optimizer_offload", "first.wide")])
def test_what_lies_in_host_memory_is_no_part_of_the_peak(spec: str, module: str | None) -> None:
    exact, moved = (watched("cuda-16gib", each).timeline() for each in ("exact", spec))
    on_host = max(moved.held_bytes["host"])

    assert on_host > max(exact.held_bytes["host"])
    assert moved.peak_bytes == sum(each.held_bytes for each in moved.holders if each.kind != "host")
    if module is not None:
        assert held_bytes(moved, kind="host", module=module) >= 2 * 64 * 256 * FLOAT


def test_every_micro_batch_has_parts_of_its_own() -> None:
    timeline = watched("cuda-16gib", "accumulate:4").timeline()

    assert [span.phase for span in timeline.spans] == [*["forward", "backward"] * 4, "optimizer"]
    assert [span.start for span in timeline.spans] == sorted(span.start for span in timeline.spans)


def test_the_same_module_of_several_blocks_is_one_holder() -> None:
    modules = ["layers.0.mlp", "layers.1.mlp", "layers.1.norm", "head"]
    origins = {name: Origin(module, "aten::mm") for name, module in enumerate(modules)}

    timeline = StepEvents([(name, 10) for name in range(4)], 4, 4, [("forward", 4)], {}, origins).timeline()

    found = {each.module: (each.tensors, each.held_bytes) for each in timeline.holders}
    assert found == {"layers.*.mlp": (2, 20), "layers.1.norm": (1, 10), "head": (1, 10)}


@pytest.mark.parametrize("count", [0, 1, POINTS - 1, POINTS, POINTS + 1, 5 * POINTS])
def test_a_record_holds_the_peak_of_any_number_of_events(count: int) -> None:
    draw = random.Random(count)
    events = [(name, draw.randrange(1, 1000)) for name in range(5)]
    for _ in range(count):
        events.append((draw.randrange(100), draw.choice([0, draw.randrange(1, 1000)])))
    live = [sum(alive(events[:at]).values()) for at in range(5, len(events) + 1)]
    peak = max(range(len(live)), key=live.__getitem__)
    origins = {name: Origin(f"layer.{name}", "aten::mm") for name in range(100)}

    timeline = StepEvents(events, 5, 5 + peak, [("forward", 5)], {0: "weights", 1: "batch"}, origins).timeline()

    assert (timeline.peak_bytes, timeline.peak_event, timeline.events) == (live[peak], peak, count)
    assert timeline.totals == tuple(live[moment] for moment in timeline.moments)
    assert max(timeline.totals) == live[peak] == sum(each.held_bytes for each in timeline.holders)
    assert list(timeline.moments) == sorted({*timeline.moments, 0, count} if count < POINTS else {*timeline.moments})
    assert len(timeline.moments) == min(count + 1, POINTS)
    assert len(timeline.holders) <= HOLDERS + 3


def test_small_holders_keep_their_lines() -> None:
    """The largest are holders of their own; of the rest each line is one, and the smallest lines are one together."""
    count = HOLDERS + 4 * LINES
    events = [(name, 10_000 - name) for name in range(count)]
    origins = {name: Origin(f"layer{name}", "aten::mm", f"a.py:{name // 2}") for name in range(count)}

    timeline = StepEvents(events, count, count, [("forward", count)], {}, origins).timeline()
    rest = [each for each in timeline.holders if each.module == OTHER]

    assert len(timeline.holders) == HOLDERS + LINES + 1
    assert [each.line for each in rest][:2] == [f"a.py:{HOLDERS // 2}", f"a.py:{HOLDERS // 2 + 1}"]
    assert [each.tensors for each in rest] == [2] * LINES + [2 * LINES]
    assert rest[-1].line is None
    assert sum(each.held_bytes for each in timeline.holders) == timeline.peak_bytes
