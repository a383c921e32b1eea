"""What processes that share layers have copies of stays alike, and what cannot be shared stays whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, PretrainedConfig

from actbench import optim
from actbench.methods.parallel.tensor.cutting import share_layers
from actbench.methods.parallel.tensor.plan import plan_of
from actbench.methods.parallel.tensor.ranks import Ranks
from actbench.methods.parallel.tensor.vocabulary import vocabulary_of

WIDTH = 64
BERT = BertConfig(
    vocab_size=97, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
)  # fmt: skip
LLAMA = LlamaConfig(
    vocab_size=97, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=128, attention_bias=True, mlp_bias=True,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=98, n_embd=WIDTH, n_layer=2, n_head=4)
PACKED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": optim.AdamW,
    "SGD": lambda params, **options: optim.SGD(params, momentum=0.9, **options),
}


def stepped(model: nn.Module, make: Callable[..., torch.optim.Optimizer], encoding: str) -> dict[str, Tensor]:
    """Step on gradients that are the same for the same name and shape; return the parameters that are trained."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = make(trained.values(), lr=0.01, encoding=encoding, seed=5)
    for step in range(4):
        for name, parameter in trained.items():
            generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in trained.items()}


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize("config", [BERT, LLAMA, GPT2], ids=lambda config: config.model_type)
@pytest.mark.parametrize("optimizer", PACKED)
@pytest.mark.parametrize("encoding", ["smaq", "int:6,rounding=stochastic"])
def test_packed_state_steps_copies_alike_though_only_the_first_process_has_the_biases_of_sums(
    config: PretrainedConfig, optimizer: str, encoding: str
) -> None:
    torch.manual_seed(0)
    whole: Any = AutoModel.from_config(config)
    found, shapes = [], {name: parameter.shape for name, parameter in whole.named_parameters()}
    for rank in range(2):
        model = copy.deepcopy(whole)
        share_layers(model, plan_of(model, "tp:2"), Ranks(2, rank, "0"), of_sequence=False)
        found.append(stepped(model, PACKED[optimizer], encoding))
    first, second = found

    copies = [name for name, parameter in second.items() if parameter.shape == shapes[name]]
    assert len(first) > len(second)  # the biases
    assert any(first[name].numel() >= WIDTH * WIDTH and first[name].dim() == 2 for name in copies)
    assert [name for name in copies if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    ("name", "value", "reason"), [("scale_grad_by_freq", True, "how often words come"), ("max_norm", 1.0, "max_norm")]
)
def test_an_embedding_that_looks_at_all_words_stays_whole(name: str, value: object, reason: str) -> None:
    model: Any = GPT2LMHeadModel(GPT2)
    assert vocabulary_of(model, 2).why_not == {}

    setattr(model.transformer.wte, name, value)
    vocabulary = vocabulary_of(model, 2)

    assert (vocabulary.embedding, vocabulary.head) == (None, None)
    assert reason in vocabulary.why_not["transformer.wte"]
