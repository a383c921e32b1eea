"""What ``liger`` takes for a norm, an MLP or a rotary embedding, and what it leaves as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from actbench import scheme as schemes
from actbench.methods.liger.forwards import FusedMlp, FusedNorm, fused
from actbench.scheme.setup import TrainingSetup

CONFIG = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=20, use_cache=False
)


class SiLUActivation(nn.Module):  # a user's own, of another function
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def mlp(**parts: nn.Module) -> LlamaMLP:
    made = LlamaMLP(CONFIG)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    "module",
    [
        mlp(gate_proj=nn.Sequential(nn.Linear(16, 32), nn.Tanh())),  # whose gradient needs what would be written over
        mlp(act_fn=SiLUActivation()),
        nn.RMSNorm((4, 8)),
    ],
    ids=["a gate that is no product", "another function of this name", "a norm of two dimensions"],
)
def test_what_computes_something_else_stays(module: nn.Module) -> None:
    assert fused(module) is None


def test_what_computes_the_same_is_taken() -> None:
    assert type(fused(mlp())) is FusedMlp
    assert type(fused(mlp(act_fn=nn.SiLU()))) is FusedMlp
    assert type(fused(nn.RMSNorm(8))) is FusedNorm


@pytest.mark.slow
def test_the_weight_of_a_packed_layer_is_not_unpacked_to_be_looked_at() -> None:
    class Packed(nn.Module):
        @property
        def weight(self) -> nn.Parameter:
            raise AssertionError

    assert fused(Packed()) is None


def test_inference_is_compiled() -> None:
    ids = torch.arange(8).view(1, 8)
    exact = LlamaForCausalLM(CONFIG).eval()
    wanted = exact(ids).logits.detach()
    model = schemes.build("liger").apply(TrainingSetup(exact)).module

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(ids).logits, wanted)
