"""Causal language models with the loss that the software of a published figure computed.

Transformers 4.48 cast logits to float32 and copied all but the last token of them before the cross entropy, which the
installed version does not; its GPTBigCode copied the logits in their own type. Torchtitan's and torchtune's loops of
early 2024 cast logits to float32 and kept them in a variable until the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig

HERE = Path(__file__).parent


def _batch(words: int, length: int, samples: int) -> dict[str, Tensor]:
    tokens = torch.randint(words, (samples, length))
    return {"input_ids": tokens, "labels": tokens}


def copied(logits: Tensor, labels: Tensor, *_: Any, dtype: torch.dtype | None = torch.float32, **__: Any) -> Tensor:
    """Return the loss of a shifted copy of the logits, as models of transformers 4.48 computed it."""
    given = logits if dtype is None else logits.to(dtype)
    shifted = given[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), labels[..., 1:].flatten())


def own(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model computes."""
    loss: Tensor = module(**batch, use_cache=False).loss
    return loss


def kept(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of float32 logits, which the loop's variable keeps until the next ones."""
    logits = vars(module)["pred"] = module(input_ids=batch["input_ids"], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW of what is trained."""
    return torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=1e-4)


def build(config: Any, length: int, dtype: torch.dtype = torch.bfloat16, inside: Any = None) -> Any:
    """Return the model, its batches, loss and optimizer; the model computes the loss ``inside``, else the loop does."""
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa", dtype=dtype)
    if inside is not None:
        model.loss_function = inside
    return model, partial(_batch, model.config.vocab_size, length), kept if inside is None else own, adamw


def _santacoder() -> Any:
    return AutoConfig.from_pretrained(HERE / "santacoder")


class Recomputed:
    """A layer that torch's reentrant checkpoint runs, as transformers called layers until 4.50: around FSDP's unit."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, **others: Any) -> Tensor:
        """Return what the layer returns; hidden states that come from frozen words get gradients."""
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_(torch.is_grad_enabled())
        found: Tensor = checkpoint(partial(self.layer, **others), given, use_reentrant=True)
        return found


class Layers(nn.ModuleList):
    """Layers that are recomputed where a model runs all of them; FSDP finds and replaces them as usual."""

    def __getitem__(self, place: Any) -> Any:
        """Return a layer, or those of a slice to run."""
        return [Recomputed(layer) for layer in self] if isinstance(place, slice) else super().__getitem__(place)


def recomputed(made: Callable[[], Any]) -> Any:
    """Return what ``made`` returns, with layers that are recomputed."""
    model, *others = made()
    model.model.layers = Layers(model.model.layers)
    return model, *others


mistral_7b_copied = partial(build, MistralConfig, 4096, inside=copied)
mistral_7b_copied_recomputed = partial(recomputed, mistral_7b_copied)
santacoder_copied = partial(build, _santacoder, 2048, inside=partial(copied, dtype=None))
llama_2_7b_copied_recomputed = partial(recomputed, partial(build, LlamaConfig, 2048, inside=copied))
llama_2_7b_kept = partial(build, LlamaConfig, 2048, torch.float32)
llama_2_7b_kept_bf16 = partial(build, LlamaConfig, 2048)
