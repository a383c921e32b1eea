"""BERT and ALBERT with a head of words, forward and backward in float16, as transformers measured fused attention.

The loop that was measured keeps its variable ``outputs`` until the next step, so the logits stay through the backward
pass. Their sum is the loss. Its gradient is one number for all logits, which the head's products copy.
No optimizer ran; SGD without state stands for none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertForMaskedLM, BertConfig, BertForMaskedLM


def _batch(config: Any, length: int, masked: bool, samples: int) -> dict[str, Tensor]:
    found = {"input_ids": torch.randint(config.vocab_size - 1, (samples, length))}
    return {**found, "attention_mask": torch.ones(samples, length, dtype=torch.long)} if masked else found


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the logits, and keep them as the loop's variable does."""
    outputs = vars(module)["outputs"] = module(**batch)
    total: Tensor = outputs.logits.sum()
    return total


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _albert() -> AlbertConfig:
    return AlbertConfig(
        vocab_size=30000,
        embedding_size=128,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def build(kind: Any, configured: Callable[[], Any], attention: str, length: int) -> Any:
    """Return the model, its batches, loss and optimizer; eager attention was measured with a mask."""
    config = configured()
    config._attn_implementation = attention
    return kind(config).half(), partial(_batch, config, length, attention == "eager"), loss, sgd


bert_eager_256 = partial(build, BertForMaskedLM, BertConfig, "eager", 256)
bert_eager_512 = partial(build, BertForMaskedLM, BertConfig, "eager", 512)
bert_sdpa_256 = partial(build, BertForMaskedLM, BertConfig, "sdpa", 256)
bert_sdpa_512 = partial(build, BertForMaskedLM, BertConfig, "sdpa", 512)
albert_eager_256 = partial(build, AlbertForMaskedLM, _albert, "eager", 256)
albert_eager_512 = partial(build, AlbertForMaskedLM, _albert, "eager", 512)
albert_sdpa_256 = partial(build, AlbertForMaskedLM, _albert, "sdpa", 256)
albert_sdpa_512 = partial(build, AlbertForMaskedLM, _albert, "sdpa", 512)
