"""Optimizers with packed state under FSDP2, over gloo: all runs in one pair of processes, which take long to start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# Rows of 144 weights end within blocks of 256, so that each process has blocks of its own.
CASE: dict[str, Any] = {
    "model": "tiny-gpt2@vocab_size=28,n_embd=48,n_layer=1,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
    "data": "text",
    "sequence_length": 64,
    "batch_size": 16,
    "optimizer": "adamw",
    "learning_rate": 3e-3,
    "steps": 4,
    "evaluate_every": 100,
}


def packed(scheme: str, strategy: str, **fields: Any) -> dict[str, Any]:
    return {"case": {**CASE, "scheme": scheme}, "strategy": strategy, **fields}


JOBS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("name", ["state", "8 bits", "released"])
def test_a_resumed_run_has_the_same_curve_bit_for_bit(found: Found, name: str) -> None:
    whole, resumed = found(name), found(f"{name}, resumed")

    assert resumed["losses"] == whole["losses"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["resumed_at"] == [2]


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
        ("bitsandbytes, shards", "take adam8bit of torchao"),
        ("host, shards", "CPUOffloadPolicy"),
        ("simulated, shards", "FSDP does not go with optimizer state"),
        ("released, copies", "before they are averaged"),
    ],
)
def test_what_does_not_go_together_is_refused(found: Found, name: str, told: str) -> None:
    assert found(name)["kind"] == "failed"
    assert told in found(name)["message"]
