"""What a case says of the blocks of its model: nothing else changes, and the parts make up the step."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile

import pytest

from actbench.errors import IdleError, NothingToConvertError
from actbench.measuring import bench as plain
from actbench.model.blocks import BlockReading, BlockReadings
from actbench.model.measured import Measurement
from actbench.model.records import Case
from actbench.simulator.sharedopcache import SharedOpCache
from actbench.tools.fit import bench

LLAMA = "tiny-llama@num_hidden_layers=6"


def case_of(model: str = LLAMA, scheme: str = "exact", **settings) -> Case:
    shapes = {} if "resnet" in model else {"sequence_length": 64, "dtype": "bfloat16"}
    return Case(
        model=model, scheme=scheme, meter="simulated", device_profile="a100-80gb", batch_size=2, **shapes, **settings
    )


def measured(scheme: str = "exact", model: str = LLAMA, **settings) -> Measurement:
    return bench.Session(case_of(model, scheme, **settings)).memory()


def readings(scheme: str = "exact", model: str = LLAMA) -> BlockReadings:
    found = measured(scheme, model).blocks
    assert found is not None
    return found


def held(block: BlockReading) -> int:
    return block.after_bytes - block.before_bytes


def test_a_file_is_made_before_processes_are_forked_and_not_by_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_shared", None)
    bench.before_forks()
    assert bench._shared is not None
    assert bench._shared.load("a card").known == {}
    listed = "len(os.listdir('/proc/self/fd'))"
    code = f"import os, torch; before = {listed}; import actbench.tools.fit.bench; print({listed} - before)"
    if os.path.isdir("/proc/self/fd"):
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "0\n"


@pytest.mark.slow
def test_a_case_after_others_is_that_of_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile() as file:
        monkeypatch.setattr(bench, "_shared", SharedOpCache(file.fileno()))
        for scheme in ("exact", "checkpoint"):
            measured(scheme)
        taken = bench._shared.load(f"{case_of().device_profile} None True")
        after = measured("checkpoint+adam8bit")
    with tempfile.TemporaryFile() as file:
        monkeypatch.setattr(bench, "_shared", SharedOpCache(file.fileno()))
        alone = measured("checkpoint+adam8bit")

    assert len(taken.known) > 100
    assert after == alone


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        (LLAMA, "exact"),
        (LLAMA, "lora:4+checkpoint,only=layers.[1-4]"),
        pytest.param(LLAMA, "release+adam8bit+gact:L2,only=layers.*", marks=pytest.mark.exhaustive),
        pytest.param(LLAMA, "chunked_loss:4+accumulate:2+selective", marks=pytest.mark.exhaustive),
        pytest.param(LLAMA, "offload,only=layers.*", marks=pytest.mark.exhaustive),
        ("resnet18", "actnn:L2,only=layer2.*"),
        pytest.param("tiny-t5", "exact", marks=pytest.mark.exhaustive),
    ],
)
def test_readings_make_up_the_step_and_change_nothing_else(model: str, scheme: str) -> None:
    found, session = measured(scheme, model), plain.Session(case_of(model, scheme))
    session.memory()  # until then offload may fetch what the look at the modules before has left behind
    without = session.memory()
    assert without.blocks is None
    looked_into = {name: getattr(without, name) for name in ("sites", "blocks", "trace")}
    assert found.model_copy(update=looked_into).model_dump_json() == without.model_dump_json()
    assert Measurement.model_validate_json(found.model_dump_json()) == found
    all_of_them, peaks = found.blocks, found.phase_peaks
    assert all_of_them is not None
    assert peaks is not None
    blocks = all_of_them.blocks
    for first, then in itertools.pairwise(blocks):
        assert first.after_bytes == then.before_bytes
    around = (all_of_them.stem_peak_bytes, all_of_them.top_peak_bytes, all_of_them.end_peak_bytes)
    within = [max(block.forward_peak_bytes, block.backward_peak_bytes) for block in blocks]
    assert max(*around, *within) == max(peaks.forward_bytes, peaks.backward_bytes)
    if "accumulate" not in scheme:  # else the last micro-batch alone is read
        seconds = [all_of_them.stem_seconds, all_of_them.top_seconds, all_of_them.end_seconds]
        seconds += [block.forward_seconds + block.backward_seconds for block in blocks]
        estimated = found.estimated
        assert estimated is not None
        assert sum(seconds) == pytest.approx(estimated.forward_seconds + estimated.backward_seconds)


def test_equal_blocks_read_alike() -> None:
    blocks = readings().blocks
    assert [block.path for block in blocks] == [f"model.layers.{number}" for number in range(6)]
    assert len({block.kind for block in blocks}) == 1
    middle = blocks[1:-1]
    assert len({held(block) for block in middle}) == 1
    assert len({block.forward_peak_bytes - block.before_bytes for block in middle}) == 1
    assert {block.output_bytes for block in blocks} == {2 * 64 * 64 * 2}
    assert all(block.backward_peak_bytes > block.done_bytes > block.before_bytes for block in blocks)
    assert max(block.backward_seconds for block in middle) == pytest.approx(middle[0].backward_seconds)


@pytest.mark.slow
def test_kinds_tell_blocks_apart() -> None:
    kinds = [block.kind for block in readings(model="resnet18").blocks]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 7
    adapted = [block.kind for block in readings("lora:4").blocks]
    assert adapted[0] != adapted[1] == adapted[5]  # no gradient is asked of what goes into the first
    layers = [block.path for block in readings(model="tiny-t5").blocks]
    assert [path.split(".")[0] for path in layers] == ["encoder", "encoder", "decoder", "decoder"]


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    "plan",
    [
        ("exact", "gact:L2", "checkpoint", "gact:L2", "gact:L2", "exact"),
        *(
            plan
            for plan in (
                ("checkpoint", "checkpoint", "exact", "exact", "selective", "exact"),
                ("exact", "checkpoint", "msln", "msln", "checkpoint", "exact"),
            )
        ),
    ],
)
def test_plans_hold_what_uniform_ones_do(plan: tuple[str, ...]) -> None:
    uniform = {action: readings(action).blocks for action in set(plan)}
    whole = readings("+".join(f"{each},only=layers.{place}" for place, each in enumerate(plan) if each != "exact"))
    expected = [uniform[action][place] for place, action in enumerate(plan)]
    assert list(map(held, whole.blocks)) == list(map(held, expected))
    assert [block.forward_peak_bytes - block.before_bytes for block in whole.blocks] == [
        block.forward_peak_bytes - block.before_bytes for block in expected
    ]


def test_who_keeps_what_is_between_two_blocks() -> None:
    residual = readings(model="resnet18").blocks
    assert all(block.keeps_output and block.keeps_input for block in residual)
    packed = readings("gact:L2,only=layer*", "resnet18").blocks
    assert not any(block.keeps_output or block.keeps_input for block in packed)
    recomputed = readings("checkpoint").blocks
    assert all(block.keeps_input and not block.keeps_output for block in recomputed)


def test_schemes_that_do_nothing_are_refused() -> None:
    with pytest.raises(NothingToConvertError):
        measured("msln", "resnet18")
    with pytest.raises(IdleError):
        measured("randomized:0.2,dim=512")  # as many as the batch has tokens, or more
