"""Runs that two processes train together, over gloo: all in one pair of processes, which take long to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actbench.errors import UsageError
from actbench.results.runs import Trained, TrainingCase
from actbench.training.launch import Launch
from actbench.training.loop import TrainingLoop
from actbench.training.processgroup import ProcessGroup

pytestmark = pytest.mark.slow

TEXT: dict[str, Any] = {
    "model": "tiny-gpt2@vocab_size=28,n_embd=16,n_layer=1",
    "data": "text",
    "sequence_length": 64,
    "batch_size": 16,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "steps": 4,
    "evaluate_every": 100,
}
PLAIN = {**TEXT, "model": f"{TEXT['model']},resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"}
DIGITS: dict[str, Any] = {
    "model": "resnet-cifar@depth=8,width=4,channels=1",
    "data": "digits",
    "image_size": 8,
    "batch_size": 64,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.9,
    "steps": 4,
    "scheme": "actnn:L3,adapt_interval=2",
}
PARTS = {**PLAIN, "gradient_accumulation": 2, "max_grad_norm": 0.5}
HALF = {**PARTS, "autocast": "float16"}
# Rows of 144 weights end within blocks of 256, so that each process has blocks of its own.
WIDE = {**PLAIN, "model": PLAIN["model"].replace("n_embd=16", "n_embd=48")}


def packed(scheme: str, strategy: str, **fields: Any) -> dict[str, Any]:
    return {"case": {**WIDE, "scheme": scheme}, "strategy": strategy, **fields}


SKETCHED = {**TEXT, "scheme": "randomized:0.5"}
JOBS: dict[str, dict[str, Any]] = {
    "copies": {"case": PLAIN, "strategy": "ddp"},
    "shards": {"case": PLAIN, "strategy": "fsdp2"},
    "copies, in parts": {"case": PARTS, "strategy": "ddp"},
    "shards, fp16": {"case": HALF, "strategy": "fsdp2"},
    "actnn": {"case": DIGITS, "strategy": "ddp"},
    "actnn, resumed": {"case": DIGITS, "strategy": "ddp", "stop": 3},
    "sketches": {"case": SKETCHED, "strategy": "fsdp2"},
    "sketches, resumed": {"case": SKETCHED, "strategy": "fsdp2", "stop": 2},
    "sketches, copies": {"case": SKETCHED, "strategy": "ddp"},
    "hooks, copies": {"case": {**TEXT, "scheme": "gact:L1"}, "strategy": "ddp"},
    "hooks, shards": {"case": {**TEXT, "scheme": "gact:L1"}, "strategy": "fsdp2"},
    "probing, shards": {"case": {**TEXT, "scheme": "gact:L2"}, "strategy": "fsdp2"},
    "float32, shards": packed("exact", "fsdp2"),
    "state, copies": packed("smaq,on=state", "ddp"),
    "state": packed("smaq,on=state", "fsdp2"),
    "state, resumed": packed("smaq,on=state", "fsdp2", stop=2),
    "8 bits, copies": packed("adam8bit", "ddp"),
    "8 bits": packed("adam8bit", "fsdp2"),
    "8 bits, resumed": packed("adam8bit", "fsdp2", stop=2),
    "released": packed("release+smaq,on=state", "fsdp2"),
    "released, resumed": packed("release+smaq,on=state", "fsdp2", stop=2),
    "bitsandbytes, shards": packed("adam8bit:bnb", "fsdp2"),
    "host, shards": packed("optimizer_offload", "fsdp2"),
    "simulated, shards": packed("encode:smaq_simulated,on=state", "fsdp2"),
    "released, copies": packed("release", "ddp"),
}

Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(together: Any) -> Found:
    results = dict(zip(JOBS, together(list(JOBS.values())), strict=True))
    return lambda name: results[name]  # type: ignore[no-any-return]


def alone(fields: dict[str, Any]) -> Trained:
    loop = TrainingLoop(TrainingCase(**fields))
    list(loop)
    return loop.result()


@pytest.mark.parametrize(
    ("name", "fields", "bound"),
    [
        ("copies", PLAIN, 1e-5),
        ("shards", PLAIN, 1e-5),
        ("copies, in parts", {**PARTS, "gradient_accumulation": 1}, 1e-5),
        ("shards, fp16", {**HALF, "gradient_accumulation": 1}, 2e-3),  # sums of halves are rounded otherwise in parts
    ],
)
def test_two_processes_learn_what_one_learns(found: Found, name: str, fields: dict[str, Any], bound: float) -> None:
    expected = alone(fields)

    assert found(name)["losses"] == pytest.approx(expected.losses, rel=bound)
    assert found(name)["evaluations"][-1]["loss"] == pytest.approx(expected.final.loss, rel=bound)
    assert found(name)["evaluations"][-1]["accuracy"] == pytest.approx(expected.final.accuracy, abs=bound)


def test_clipping_and_scaling_change_what_is_learned(found: Found) -> None:
    assert found("copies, in parts")["losses"] != pytest.approx(found("copies")["losses"], rel=1e-5)
    assert found("shards, fp16")["losses"] != pytest.approx(found("copies, in parts")["losses"], rel=1e-7)


def test_all_processes_have_the_same_weights(found: Found) -> None:
    for name in JOBS:
        if found(name)["kind"] == "trained":
            first, second = found(name)["weights"]
            assert first == second, name


def test_bytes_are_those_of_each_process(found: Found) -> None:
    copies, shards = found("copies"), found("shards")
    half = alone({**PLAIN, "batch_size": 8})
    parameters = half.weights_bytes // 4

    assert copies["weights_bytes"] == half.weights_bytes
    assert copies["rank_activation_bytes"] == [half.activation_bytes] * 2
    assert copies["activation_bytes"] == half.activation_bytes
    assert copies["peak_bytes"] == max(copies["rank_peak_bytes"])
    needed = copies["weights_bytes"] + copies["optimizer_bytes"] + copies["activation_bytes"]
    assert copies["peak_bytes"] >= needed + 4 * parameters  # gradients stay where they are averaged
    assert copies["shares"] == [parameters] * 2
    assert shards["shares"] == [parameters // 2] * 2
    assert shards["weights_bytes"] == half.weights_bytes // 2
    steps = (half.optimizer_bytes or 0) - 2 * half.weights_bytes  # AdamW's count of steps, for each parameter
    assert shards["optimizer_bytes"] == 2 * half.weights_bytes // 2 + steps


@pytest.mark.parametrize("name", ["actnn", "sketches", "state", "8 bits", "released"])
def test_a_resumed_run_has_the_same_curve_bit_for_bit(found: Found, name: str) -> None:
    whole, resumed = found(name), found(f"{name}, resumed")

    assert resumed["losses"] == whole["losses"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["resumed_at"] == [JOBS[f"{name}, resumed"]["stop"]]


def test_processes_draw_other_noise(found: Found) -> None:
    assert found("sketches, copies")["losses"] != pytest.approx(alone(SKETCHED).losses, rel=1e-5)


@pytest.mark.parametrize(("copies", "shards"), [("sketches, copies", "sketches"), ("hooks, copies", "hooks, shards")])
def test_schemes_do_to_shards_what_they_do_to_copies(found: Found, copies: str, shards: str) -> None:
    # Of gathered parameters, too: packed by hooks, their errors would be others in each process and each step.
    assert found(shards)["losses"] == pytest.approx(found(copies)["losses"], rel=1e-5)


@pytest.mark.parametrize(("copies", "shards"), [("state, copies", "state"), ("8 bits, copies", "8 bits")])
def test_state_of_shards_is_as_near_to_that_of_copies_as_rounding_is_to_none(
    found: Found, copies: str, shards: str
) -> None:
    exact, of_copies, of_shards = (found(name)["losses"] for name in ("float32, shards", copies, shards))
    rounding = max(abs(one - other) for one, other in zip(exact, of_copies, strict=True))

    assert of_shards == pytest.approx(of_copies, abs=2 * rounding)
    assert found(shards)["optimizer_bytes"] < found("float32, shards")["optimizer_bytes"]


def test_shards_that_are_stepped_within_the_backward_pass_have_the_bits_of_those_that_are_not(found: Found) -> None:
    assert found("released")["losses"] == found("state")["losses"]
    assert found("released")["weights"] == found("state")["weights"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("probing, shards", "auto_prec=false"),
        ("bitsandbytes, shards", "take adam8bit of torchao"),
        ("host, shards", "CPUOffloadPolicy"),
        ("simulated, shards", "FSDP does not go with optimizer state"),
        ("released, copies", "before they are averaged"),
    ],
)
def test_what_does_not_go_together_is_refused(found: Found, name: str, told: str) -> None:
    assert found(name)["kind"] == "failed"
    assert told in found(name)["message"]


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    group = ProcessGroup(Launch(rank=1, size=3, strategy="ddp"))

    with pytest.raises(UsageError, match="multiple of 6"):
        TrainingLoop(TrainingCase(**PARTS, processes=3, strategy="ddp"), group)


def test_shares_make_up_the_batch_of_one_process() -> None:
    def batches(rank: int, size: int) -> tuple[torch.Tensor, list[int]]:
        loop = TrainingLoop(TrainingCase(**{**DIGITS, "scheme": "exact"}), ProcessGroup(Launch(rank=rank, size=size)))
        return loop._batch(1)["images"], [rows for _, rows in loop._feed.validation()]

    whole, judged = batches(0, 1)
    shares, rows = zip(*(batches(rank, 4) for rank in range(4)), strict=True)

    assert torch.equal(torch.cat(shares), whole)
    assert [sum(of_ranks) for of_ranks in zip(*rows, strict=True)] == judged
