"""Runs that two processes train together, over gloo: all in one pair of processes, which take long to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from actbench.errors import UsageError
from actbench.tools.train.launch import Launch
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import Trained, TrainingCase

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


@pytest.mark.parametrize("name", ["actnn", "sketches"])
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


def test_what_shards_cannot_do_is_refused(found: Found) -> None:
    refused = found("probing, shards")

    assert refused["kind"] == "failed"
    assert "auto_prec=false" in refused["message"]


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
