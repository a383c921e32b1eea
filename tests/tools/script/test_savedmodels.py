"""What a script saved by save_pretrained it finds again in the same run, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from actbench.errors import ModelError
from actbench.simulator import profiles
from actbench.tools.script.simulation import Simulation

SIZES = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 990}


@pytest.fixture
def card() -> Iterator[Simulation]:
    with Simulation(profiles.get("rtx-4090")) as found:
        yield found


def model() -> Any:
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **SIZES)).to(torch.bfloat16).cuda()  # type: ignore[arg-type]


def test_a_model_is_found_again_by_every_name_of_its_folder(card: Simulation, tmp_path: Path) -> None:
    folder, own = tmp_path / "saved", model()
    own.generation_config.max_length = 77
    own.save_pretrained(str(folder))

    for name in (folder, str(folder), os.path.relpath(folder), f"{folder}/"):
        found = AutoModelForCausalLM.from_pretrained(name)
        assert type(found) is LlamaForCausalLM
        assert found.num_parameters() == own.num_parameters()
        assert found.dtype is torch.bfloat16
        assert not next(found.parameters()).is_cuda
    assert LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).dtype is torch.float32
    assert AutoConfig.from_pretrained(folder).vocab_size == SIZES["vocab_size"]
    assert GenerationConfig.from_pretrained(folder).max_length == 77
    assert not list(tmp_path.iterdir())
    assert "PreTrainedModel.save_pretrained writes nothing: tensors of a simulated run have no values." in card.notes


def test_what_was_saved_last_is_found_before_what_the_folder_holds(tiny_llama: Path, card: Simulation) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_llama.iterdir()}
    old = AutoConfig.from_pretrained(tiny_llama).vocab_size

    model().save_pretrained(tiny_llama)

    assert old != SIZES["vocab_size"]
    assert AutoConfig.from_pretrained(tiny_llama).vocab_size == SIZES["vocab_size"]
    assert AutoModelForCausalLM.from_pretrained(tiny_llama).num_parameters() == model().num_parameters()
    assert len(AutoTokenizer.from_pretrained(tiny_llama)) == 20
    assert {path.name: path.stat().st_mtime_ns for path in tiny_llama.iterdir()} == before


@pytest.mark.slow
def test_a_model_that_a_trainer_saves_is_found_again_with_its_tokenizer(
    tiny_llama: Path, card: Simulation, tmp_path: Path
) -> None:
    words = AutoTokenizer.from_pretrained(tiny_llama)
    trainer = Trainer(model(), TrainingArguments(str(tmp_path / "runs"), report_to=[]), processing_class=words)

    trainer.save_model(str(tmp_path / "trained"))

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.vocab_size == SIZES["vocab_size"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "trained")) == len(words)
    assert not (tmp_path / "trained" / "config.json").exists()


@pytest.mark.slow
def test_adapters_are_found_again(card: Simulation, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

    model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapters")

    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapters")
    alone = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")

    assert again.peft_config["default"].r == alone.peft_config["default"].r == 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() == model().num_parameters()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_of_diffusers_is_found_again(card: Simulation, tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    own = UNet2DModel(sample_size=8, block_out_channels=(32, 64), layers_per_block=1, **blocks)
    own.save_pretrained(tmp_path / "unet")

    assert UNet2DModel.from_pretrained(tmp_path / "unet").num_parameters() == own.num_parameters()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "says"), [("", "by an empty name"), ("./runs/last/best", "no model in it")])
def test_a_name_that_is_none_of_the_hub_is_not_to_be_downloaded(card: Simulation, name: str, says: str) -> None:
    with pytest.raises((ModelError, OSError), match=says) as refused:
        LlamaConfig.from_pretrained(name)

    assert "hf download" not in str(refused.value)
