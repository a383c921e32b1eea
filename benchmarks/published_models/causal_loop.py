"""Causal language models, forward and backward in float16, as transformers measured fused attention.

Transformers 4.45 laid out queries, keys and values of OPT by heads, so what attends is laid out so, too, and is copied
for the next product. Transformers 4.41 returned GPT-NeoX's keys in float32, in which they are turned, and values as
views of the product of queries, keys and values; each block held a causal mask of all places.

The loop is that of ``masked_lm.py``; what it keeps until the next step has the keys and values, too, since models
return them unless they are told not to. A name is that of a model and the length:
``causal_loop.py:opt_350m_128``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from masked_lm import _batch, loss, sgd
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, OPTConfig, OPTForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def by_heads(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> Any:
    """Return fused attention of what is laid out by heads."""
    return sdpa_attention_forward(module, query.contiguous(), key.contiguous(), value.contiguous(), *others, **more)


AttentionInterface.register("sdpa_by_heads", by_heads)


def build(kind: Any, config: Any, length: int, attention: str = "sdpa") -> Any:
    """Return the model with fused attention, its batches without a mask, loss and optimizer."""
    config._attn_implementation = attention
    return kind(config).half(), partial(_batch, config, length, False), loss, sgd


def pythia_410m(length: int) -> Any:
    """Return Pythia 410M."""
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=2048,
    )
    return build(GPTNeoXForCausalLM, config, length)


class Kept(DynamicCache):
    """A cache that keeps keys in float32, and values as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a block, and return them."""
        self.kept.append((key.float(), value))
        return key, value


def cached(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the logits, and keep the outputs, with the cache, as the loop's variable does."""
    return loss(module, {**batch, "past_key_values": Kept()})  # type: ignore[dict-item]


def pythia_410m_kept(length: int) -> Any:
    """Return Pythia 410M with the cache and the masks of transformers 4.41."""
    model, batches, _, optimizer = pythia_410m(length)
    for layer in model.gpt_neox.layers:
        layer.attention.register_buffer("bias", torch.ones(1, 1, 2048, 2048, dtype=torch.bool))
    return model, batches, cached, optimizer


def opt_350m(length: int) -> Any:
    """Return OPT 350M, whose embeddings have half its width."""
    config = OPTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    )
    return build(OPTForCausalLM, config, length, "sdpa_by_heads")


def __getattr__(name: str) -> Any:
    """Return what builds a model for a length: ``NAME_LENGTH``."""
    model, _, length = name.rpartition("_")
    if model not in globals() or not length.isdecimal():
        raise AttributeError(name)
    return partial(globals()[model], int(length))
