"""Steps that are joined from segments of traces are those that a simulation of the whole model finds."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from actbench.errors import UsageError
from actbench.measuring.meters.peak import Event
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator import profiles
from actbench.simulator.join import Joined, Joiner
from actbench.simulator.trace import HOST, Label, Trace, labels_of
from actbench.tools.fit.bench import Session
from actbench.tools.fit.costs import Blocks
from actbench.tools.fit.join import measured

CARD = "a100-80gb"
ACTIONS = {"c": "checkpoint", "g": "gact:L2.2", "o": "offload", "e": "exact"}
TEXT = {"batch_size": 16, "sequence_length": 64}
MODELS: dict[str, dict[str, Any]] = {
    "tiny-llama@num_hidden_layers=6": TEXT,
    "tiny-bert@num_hidden_layers=6": TEXT,
    "tiny-t5@num_layers=3": TEXT,
    "tiny-roberta@num_hidden_layers=6": {"batch_size": 2, "sequence_length": 32, "autocast": "bfloat16"},
    "resnet18": {"batch_size": 16, "image_size": 64},
}


def simulated(scheme: str, model: str, **settings: Any) -> tuple[Measurement, Trace]:
    case = Case(model=model, scheme=scheme, meter="simulated", device_profile=CARD, gradient_quality=False, **settings)
    found = Session(case).memory()
    assert found.trace is not None
    return found, Trace.unpacked(found.trace)


def spec(plan: str, paths: tuple[str, ...]) -> str:
    chosen = dict.fromkeys(plan.replace("e", ""))
    places = {each: [path for path, one in zip(paths, plan, strict=True) if one == each] for each in chosen}
    return "+".join(f"{ACTIONS[each]},only={'/'.join(found)}" for each, found in places.items()) or "exact"


def traces(model: str, blocks: tuple[str, ...], **settings: Any) -> Mapping[Hashable, Trace]:
    return {each: simulated(spec(each * len(blocks), blocks), model, **settings)[1] for each in "cgo"}


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize("model", MODELS)
def test_a_joined_step_is_the_simulated_one(model: str) -> None:
    settings, profile = MODELS[model], profiles.get(CARD)
    exact, base = simulated("exact", model, **settings)
    joiner = Joiner(base, traces(model, base.blocks, **settings))
    count = len(base.blocks)

    for pattern in ("e", "c", "ge", "oe", "ec", "cgoe", "ogco"):
        plan = "".join(itertools.islice(itertools.cycle(pattern), count))
        whole, _ = simulated(spec(plan, base.blocks), model, **settings)
        joined = measured(exact, joiner, plan, profile, profile.step_bytes(None), ())

        assert joined.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.003), plan
        forward, simulated_forward = (each.phase_peaks.forward_bytes for each in (joined, whole))
        assert forward == pytest.approx(simulated_forward, rel=0.003)
        assert joined.host_bytes == whole.host_bytes
        assert joined.reserved_bytes == pytest.approx(whole.reserved_bytes, rel=0.02)
        assert joined.estimated is not None
        assert whole.estimated is not None
        assert joined.estimated.step_seconds == pytest.approx(whole.estimated.step_seconds, rel=1e-6)


WHISPER = (
    "whisper-small@encoder_layers=2,decoder_layers=3,d_model=64,encoder_ffn_dim=128,decoder_ffn_dim=128,"
    "encoder_attention_heads=2,decoder_attention_heads=2"
)


@pytest.mark.slow
def test_what_the_encoder_returns_is_freed_where_a_simulation_frees_it() -> None:
    _, base = simulated("exact", WHISPER, batch_size=1)
    joiner = Joiner(base, traces(WHISPER, base.blocks, batch_size=1))

    for plan in ("egggg", "oeego", "ccgeo", "eegeg"):
        _, whole = simulated(spec(plan, base.blocks), WHISPER, batch_size=1)
        assert alive_bytes(joiner.join(plan)) == alive_bytes(Joiner(whole, {}).unchanged), plan


def alive_bytes(step: Joined) -> list[int]:
    """Return the bytes that are alive after each event of the passes and of the first update."""
    held, live, found = dict[int, int](), 0, list[int]()
    for name, amount in itertools.chain(*step.run[:4]):
        live += amount - held.get(name, 0)
        held[name] = amount
        found.append(live)
    return found


def test_four_blocks_tell_what_nine_do() -> None:
    _, few = simulated("checkpoint", "tiny-llama@num_hidden_layers=4", **TEXT)
    whole, many = simulated("checkpoint", "tiny-llama@num_hidden_layers=9", **TEXT)

    grown = few.repeated(many.blocks, [0, 1, *[2] * 6, 3])

    assert grown is not None
    assert grown.blocks == many.blocks
    of_blocks = [label for label in labels_of(9) if label.block >= 0]
    assert [amounts(grown, label) for label in of_blocks] == [amounts(many, label) for label in of_blocks]
    joined = Joiner(many, {}).join("e" * 9)
    again = Joiner(many, {"c": grown}).join("c" * 9)
    assert joined.peak_bytes == again.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize(
    "scheme",
    [
        "autocast:bfloat16",
        pytest.param("gact:L2.2", marks=pytest.mark.slow),
        pytest.param("offload", marks=pytest.mark.slow),
    ],
)
def test_one_block_of_each_row_tells_what_all_do(scheme: str) -> None:
    model, settings = "resnet50", {"batch_size": 2, "image_size": 64}
    found, whole = simulated("exact", model, **settings)
    blocks = Blocks.of(found.blocks).shortened(model)
    assert blocks is not None
    assert blocks.copy == "resnet50@without=layer1.2/layer2.[2-3]/layer3.[2-5]"
    only = "" if scheme.startswith("autocast") else ",only=Bottleneck"
    _, many = simulated(f"{scheme}{only}", model, **settings)
    _, few = simulated(f"{scheme}{only}", blocks.copy, **settings)

    grown = few.repeated(whole.blocks, blocks.places)

    assert grown is not None
    for label in (each for each in labels_of(16) if each.block >= 0 or each.kind in ("start", "top", "end")):
        told, true = (of_storages(trace, label) for trace in (grown, many))
        assert sorted(told) == sorted(true) if label.kind == "top" else told == true, label  # casts, by block


def of_storages(trace: Trace, label: Label) -> list[tuple[tuple[Label, int], int]]:
    """Return the events of a segment, each storage as the n-th that a segment allocates."""
    keys = trace.keys()
    return [(keys[name], amount) for name, amount in trace.segments[label].events]


def test_blocks_that_leave_other_storages_do_not_stand_for_each_other() -> None:
    _, few = simulated("offload,only=BasicBlock", "resnet18", batch_size=2, image_size=64)

    assert few.repeated(few.blocks, range(8)) is not None
    # the first block of a stage has an input of another size than its output
    assert few.repeated([*few.blocks, "more"], [0, 1, 2, *range(2, 8)]) is None


def amounts(trace: Trace, label: Label) -> list[int]:
    return [amount for _, amount in trace.segments[label].events]


def test_a_trace_is_written_as_lines_and_read_back() -> None:
    _, trace = simulated("offload", "tiny-llama@num_hidden_layers=4", **TEXT)

    assert HOST in trace.streams.values()
    assert Trace.of_lines(trace.lines()) == trace
    with pytest.raises(UsageError, match="another version"):
        Trace.of_lines(['{"trace":0}'])
    with pytest.raises(UsageError, match="first line"):
        Trace.of_lines([*trace.lines()][1:])


def test_all_that_a_trace_frees_was_allocated() -> None:
    _, trace = simulated("gact:L2", "tiny-bert@num_hidden_layers=4", **TEXT)
    seen = set[int]()
    events: list[Event] = [event for segment in trace.segments.values() for event in segment.events]

    for name, amount in events:
        assert amount or name in seen
        seen.add(name)
    assert list(trace.segments) == labels_of(4)
