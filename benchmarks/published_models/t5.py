"""T5 as two papers trained it: on GLUE as text with short targets, and on embedded inputs with a loss at each token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

WORDS, SOURCE, TARGET, EMBEDDED = 32128, 128, 3, 256


def _model(attention: str, **shape: int) -> Any:
    config = T5Config(vocab_size=WORDS, d_kv=64, decoder_start_token_id=0, use_cache=False, **shape)
    config._attn_implementation = attention
    return T5ForConditionalGeneration(config)


def glue_batch(samples: int) -> dict[str, Tensor]:
    """Return padded sentences and targets of three tokens."""
    return {
        "input_ids": torch.randint(5, 32000, (samples, SOURCE)),
        "attention_mask": torch.ones(samples, SOURCE, dtype=torch.long),
        "labels": torch.randint(5, 32000, (samples, TARGET)),
    }


def own_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = module(**batch).loss
    return loss


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW without foreach over the trained parameters."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=3e-4, foreach=False)


def glue(width: int, layers: int, heads: int) -> Any:
    """Return a T5 with eager attention, its batches, loss and optimizer."""
    shape = {"d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_decoder_layers": layers}
    return _model("eager", num_heads=heads, **shape), glue_batch, own_loss, adamw


glue_base = partial(glue, 768, 12, 12)
glue_large = partial(glue, 1024, 24, 16)


def embedded_batch(samples: int) -> dict[str, Tensor]:
    """Return embedded tokens, for encoder and decoder, and a label for each."""
    embedded = torch.randn(samples, EMBEDDED, 768)
    return {"embedded": embedded, "labels": torch.randint(WORDS, (samples, EMBEDDED))}


def embedded_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of logits with words in the second dimension."""
    embedded = batch["embedded"]
    logits = module(inputs_embeds=embedded, decoder_inputs_embeds=embedded, use_cache=False).logits
    return F.cross_entropy(logits.permute(0, 2, 1), batch["labels"])


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD over the trained parameters."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def embedded_base() -> Any:
    """Return T5-base with frozen embeddings, its batches, loss and optimizer."""
    model = _model("sdpa", d_model=768, d_ff=3072, num_layers=12, num_decoder_layers=12, num_heads=12)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    return model, embedded_batch, embedded_loss, sgd
