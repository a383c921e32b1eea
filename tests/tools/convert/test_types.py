"""Types of the parameters of converted models that are saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchvision
import transformers
from torch import nn

from actbench.errors import ConversionError
from actbench.tools.convert.folders import load_converted, save_converted
from actbench.tools.convert.model import convert


def gpt2(first: torch.dtype, other: torch.dtype) -> nn.Module:
    """A model whose embedding, which is the head too, is of one type and whose norms are of another."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).to(first)
    for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
        norm.to(other)
    return model


def resnet(first: torch.dtype, other: torch.dtype) -> nn.Module:
    model = torchvision.models.resnet18().to(first)
    model.layer4.to(other)
    return model


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("kind", ["huggingface", "torchvision"])
def test_every_tensor_comes_back_in_its_type(kind: str, types: tuple[str, str], tmp_path: Path) -> None:
    first, other = (getattr(torch, name) for name in types)
    if kind == "huggingface":
        plain, scheme, built_from = gpt2(first, other), "fewbit:3", None
    else:
        plain, scheme, built_from = resnet(first, other), "actnn:L1", "resnet18"
    model = convert(plain, scheme)
    folder = save_converted(model, tmp_path / "model", built_from=built_from)
    back = load_converted(folder).state_dict()

    assert json.loads((folder / "actbench.json").read_text())["dtype"] == (None if first != other else types[0])
    for name, tensor in model.state_dict().items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype, name


def test_a_type_that_is_not_built_is_refused_alone(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="this model is float64"):
        save_converted(convert(gpt2(torch.float64, torch.float64), "fewbit:3"), tmp_path / "model")
