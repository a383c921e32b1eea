"""Causal language models with the loss of the fused kernels of fms-acceleration, which are those of unsloth.

The kernel writes the gradient of the logits over them. Before it, transformers 4.45 made the logits float32 in the
model's own forward pass, and let go of those in 16 bits; 4.48 does so in the loss, while the model still holds them.
Both then copy all but the last token. GPTBigCode does not make them float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from causal_lm import _batch, _santacoder, adamw, build, copied, recomputed
from moe import with_linear_experts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, MistralConfig, MixtralConfig
from transformers.loss.loss_utils import ForCausalLMLoss


class _InPlace(torch.autograd.Function):
    """Allocates what the kernel does: two float32 numbers a token; what the kernel writes is not computed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = logits.new_zeros(len(logits), dtype=torch.float32)
        ctx.save_for_backward(logits, torch.zeros_like(losses), labels)
        return losses

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def fused(logits: Tensor, labels: Tensor, *_: Any, dtype: torch.dtype | None = torch.float32, **__: Any) -> Tensor:
    """Return the loss of a shifted copy of the logits, in ``dtype``."""
    given = logits if dtype is None else logits.to(dtype)
    shifted = given[..., :-1, :].contiguous()
    return _InPlace.apply(shifted.flatten(0, 1), labels[..., 1:].flatten()).sum() / labels.numel()


def after(module: nn.Module, batch: Mapping[str, Tensor], loss: Any) -> Tensor:
    """Return the loss of float32 logits of which no others are held, as in transformers 4.45."""
    logits = module(input_ids=batch["input_ids"], use_cache=False).logits.float()
    total: Tensor = loss(logits, batch["labels"], dtype=None)
    return total


def old(config: Any, length: int, dtype: torch.dtype, loss: Any) -> Any:
    """Return the model, its batches, the loss as transformers 4.45 led to it, and the optimizer."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa", dtype=dtype)
    return model, partial(_batch, model.config.vocab_size, length), partial(after, loss=loss), adamw


CONFIGS = {
    "mistral_7b_flash": partial(MistralConfig, sliding_window=None),  # FlashAttention 2 has the window, but no mask
    "mistral_7b": MistralConfig,
    "mixtral": partial(MixtralConfig, sliding_window=None),
    "llama_3_8b": partial(LlamaConfig, vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    "llama_2_70b": partial(
        LlamaConfig,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "powerlm_3b": partial(
        GraniteConfig,
        vocab_size=49152,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=40,
        num_attention_heads=36,
        tie_word_embeddings=True,
    ),
}
TYPES = {"fp16": torch.float16, "fp32": torch.float32}

santacoder_fused_448 = partial(build, _santacoder, 2048, torch.bfloat16, partial(fused, dtype=None))


def __getattr__(name: str) -> Any:
    """Return what builds a model of 4,096 tokens: ``MODEL_LOSS``, ``_448`` and a type other than bf16.

    A ``plain`` loss is that of the installed transformers; ``_recomputed`` layers are recomputed around FSDP's units.
    """
    model = next((each for each in CONFIGS if name.startswith(f"{each}_")), None)
    if model is None:
        raise AttributeError(name)
    loss, *options = name.removeprefix(f"{model}_").split("_")
    dtype = next((TYPES[each] for each in options if each in TYPES), torch.bfloat16)
    if loss == "plain":
        made = partial(build, CONFIGS[model], 4096, dtype, ForCausalLMLoss)
    else:
        makes = build if "448" in options else old
        made = partial(makes, CONFIGS[model], 4096, dtype, {"copied": copied, "fused": fused}[loss])
    return partial(_made, made, model == "mixtral", "recomputed" in options)


def _made(made: Any, apart: bool, again: bool) -> Any:
    model, *others = recomputed(made) if again else made()
    return with_linear_experts(model) if apart else model, *others
