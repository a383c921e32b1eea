"""Causal language models, forward and backward in float16, as transformers measured fused attention.

Transformers 4.45 laid out queries, keys and values of OPT by heads, so what attends is laid out so, too, and is copied
for the next product. The loop is that of ``masked_lm.py``; what it keeps until the next step has the keys and values,
too, since models return them unless they are told not to. A name is that of a model and the length:
``causal_loop.py:opt_350m_128``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from masked_lm import _batch, loss, sgd
from torch import Tensor, nn
from transformers import AttentionInterface, GPTNeoXConfig, GPTNeoXForCausalLM, OPTConfig, OPTForCausalLM
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
