"""Losses and gradients of processes that share layers, over gloo: all jobs in one set of processes, slow to start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

QWEN = (
    "qwen3-0.6b@hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,head_dim=16,"
    "intermediate_size=96,vocab_size=512"
)
BIASED = "tiny-llama@attention_bias=true,mlp_bias=true,num_attention_heads=4,num_key_value_heads=2"
MODELS = ["tiny-llama", QWEN, BIASED, "tiny-gpt2", "tiny-bert", "tiny-roberta", "tiny-distilbert", "tiny-vit"]
OF_TWO = {
    **{model: {"model": model, "spec": "tp:2"} for model in MODELS},
    **{
        f"{model}, tokens": {"model": model, "spec": "tp:2,sequence=true"} for model in (QWEN, "tiny-gpt2", "tiny-bert")
    },
    "uneven words": {"model": "tiny-llama@vocab_size=511", "spec": "tp:2"},
    "checkpoint": {"model": "tiny-llama", "spec": "tp:2+checkpoint"},
    "checkpoint, tokens": {"model": "tiny-llama", "spec": "tp:2,sequence=true+checkpoint"},
    "chunked_loss": {"model": "tiny-llama", "spec": "tp:2+chunked_loss"},
    "release": {"model": "tiny-llama", "spec": "tp:2+release"},
    "accumulate": {"model": "tiny-llama", "spec": "tp:2+accumulate:2"},
    "tiled_mlp": {"model": "tiny-llama", "spec": "tp:2+tiled_mlp:3"},
    "tiled_mlp, biases": {"model": "tiny-gpt2", "spec": "tp:2+tiled_mlp:3"},
    "fewbit": {"model": "tiny-llama", "spec": "tp:2+fewbit:3", "alone": "fewbit:3"},
    "fewbit, tokens": {"model": "tiny-gpt2", "spec": "tp:2,sequence=true+fewbit:3", "alone": "fewbit:3"},
    "lora": {"model": "tiny-llama", "spec": "lora:4+tp:2", "alone": "lora:4"},
    "lora, tokens": {"model": "tiny-gpt2", "spec": "lora:4+tp:2,sequence=true", "alone": "lora:4"},
}
RANDOM = {
    "actnn": {"model": "tiny-gpt2", "spec": "tp:2+actnn:L2"},
    "randomized": {"model": "tiny-gpt2", "spec": "tp:2+randomized:0.5"},
    "gact": {"model": "tiny-llama", "spec": "tp:2+gact:L1"},
}
PASSES = 24
DROPPING = {
    "dropping": {"model": "tiny-gpt2", "spec": "tp:2", "dropping": True},
    "dropping, tiled_mlp": {"model": "tiny-gpt2", "spec": "tp:2+tiled_mlp:3", "dropping": True},
    "dropping, tokens": {"model": "tiny-bert", "spec": "tp:2,sequence=true", "dropping": True},
}
OF_FOUR = {
    "four": {"model": "tiny-gpt2@n_head=4", "spec": "tp:4"},
    "four, tokens": {"model": BIASED.replace("heads=2", "heads=4"), "spec": "tp:4,sequence=true"},
    "shards": {"model": "tiny-llama", "spec": "fsdp:2+tp:2", "axes": {"dp": 2, "tp": 2}},
    "shards, tokens": {"model": QWEN, "spec": "fsdp:2+tp:2,sequence=true", "axes": {"dp": 2, "tp": 2}},
}

Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(share: Any) -> Found:
    random = {f"{name}, {passes}": {**job, "passes": passes} for name, job in RANDOM.items() for passes in (2, PASSES)}
    pairs = OF_TWO | random | DROPPING
    results = dict(zip(pairs, share(2, [{"alone": "exact", **job} for job in pairs.values()]), strict=True))
    fours = share(4, [{"alone": "exact", **job} for job in OF_FOUR.values()])
    results.update(zip(OF_FOUR, fours, strict=True))
    return results.__getitem__


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_losses_and_gradients_are_those_of_one_process(name: str, found: Found) -> None:
    result = found(name)

    if "shards" not in name:  # whose losses are of a batch of their own
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-5)
    assert {key: error for key, error in result["errors"].items() if error > 1e-4} == {}
    assert len(result["errors"]) > 5


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR, *DROPPING, *(f"{name}, 2" for name in RANDOM)])
def test_gradients_of_what_all_processes_have_are_alike_to_the_bit(name: str, found: Found) -> None:
    assert found(name)["apart"] == []


@pytest.mark.parametrize("name", RANDOM)
def test_the_mean_gradient_of_what_is_packed_at_random_goes_to_the_exact_one(name: str, found: Found) -> None:
    few, many = found(f"{name}, 2")["errors"], found(f"{name}, {PASSES}")["errors"]
    noisy = [key for key, error in few.items() if error > 0.01]
    shrunk = math.prod(many[key] / few[key] for key in noisy) ** (1 / len(noisy))

    assert len(noisy) > 5
    assert shrunk == pytest.approx(math.sqrt(2 / PASSES), rel=0.4)


@pytest.mark.parametrize("name", DROPPING)
def test_what_is_dropped_leaves_all_processes_with_the_same_loss(name: str, found: Found) -> None:
    first, second = found(name)["losses"]

    assert first == second
