"""Small models of five architectures, without weights of anybody's, and the batches that they train on, on a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROWS, WORDS = 4, 300
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _words() -> Tensor:
    return torch.randint(5, WORDS, (ROWS, 32), device="cuda")


def _classes() -> Tensor:
    return torch.randint(0, 2, (ROWS,), device="cuda")


def _pictures(size: int) -> Tensor:
    return torch.randn(ROWS, 3, size, size, device="cuda")


class Convolutional(nn.Sequential):
    """Convolutions, norms and linear layers one after the other; returns a loss as models of transformers do."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 64)]
        layers += [nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)]
        super().__init__(*layers)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        loss = nn.functional.cross_entropy(super().forward(pixel_values), labels)
        return transformers.modeling_outputs.ImageClassifierOutput(loss=loss)


def gpt2() -> nn.Module:
    config = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=WORDS))


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES, vocab_size=WORDS))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=32, patch_size=8))


def _of_language() -> dict[str, Tensor]:
    words = _words()
    return {"input_ids": words, "labels": words}


ARCHITECTURES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "convolutional": (Convolutional, lambda: {"pixel_values": _pictures(16), "labels": _classes()}),
    "gpt2": (gpt2, _of_language),
    "llama": (llama, _of_language),
    "roberta": (roberta, lambda: {"input_ids": _words(), "labels": _classes()}),
    "vit": (vit, lambda: {"pixel_values": _pictures(32), "labels": _classes()}),
}
"""How a model is made, and a batch for it."""


def train(name: str, steps: int = 6) -> None:
    """Train as a script does, on the card."""
    build, batch = ARCHITECTURES[name]
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
