"""Counts in configs that others wrote: those that a constructor loops over are refused before it sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actbench.errors import ModelError
from actbench.model.records import Case
from actbench.workload import load_workload
from actbench.workload.huggingface import check_counts

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForSequenceClassification"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
HUGE = 10**12


@pytest.mark.parametrize(
    ("changes", "name", "most"),
    [
        ({"num_labels": HUGE}, "num_labels", "1,000,000"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers", "100,000"),
        ({"model_type": "gpt2", "n_layer": HUGE}, "n_layer", "100,000"),
        ({"text_config": {"decoder_layers": HUGE}}, "decoder_layers", "100,000"),
        ({"depths": [2, HUGE]}, "depths", "100,000"),
        ({"parts": [{"num_nextn_predict_layers": HUGE}]}, "num_nextn_predict_layers", "100,000"),
        ({"num_experts": HUGE}, "num_experts", "100,000"),
        ({"num_key_value_heads": HUGE}, "num_key_value_heads", "10,000,000"),
    ],
)
def test_a_count_that_no_model_has_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, Any], name: str, most: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))

    with pytest.raises(ModelError, match=rf"config\.json: {name} is 1,000,000,000,000, and may be {most} at most"):
        load_workload(Case(model=str(tmp_path), batch_size=1))


def test_so_is_one_that_the_specification_changes() -> None:
    with pytest.raises(ModelError, match=r"num_labels is 1,000,000,000,000, and may be 1,000,000 at most"):
        load_workload(Case(model=f"tiny-bert@num_labels={HUGE}", batch_size=1))


def test_sizes_and_settings_of_real_models_are_no_counts() -> None:
    real = {
        "vocab_size": 256_000,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 500_000_000,
        "model_max_length": 10**30,
        "num_labels": 670_091,
        "block_size": 131_072,
        "layer_norm_eps": 1e-5,
        "use_layers": True,
    }

    check_counts(real, "here")
