"""T5-base on embedded inputs with a loss at each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

WORDS, EMBEDDED = 32128, 256


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
    shape = {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
    config = T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **shape)
    config._attn_implementation = "sdpa"
    model = T5ForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    return model, embedded_batch, embedded_loss, sgd
