"""Which operators of other libraries' models have no kind: `benchmarks/unknown_operators.py`."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

CLASSIFIERS = {
    "of_torchvision": ("resnet18", "mobilenet_v3_small", "convnext_tiny", "swin_t"),
    "of_timm": ("convnextv2_atto", "levit_128s", "vit_tiny_patch16_224", "xcit_nano_12_p16_224"),
}
CONFIGS = {
    "causal-lm": ("cpmant", "gpt2", "llama", "mamba", "qwen3_moe"),
    "masked-lm": ("fnet", "deberta-v2", "modernbert"),
    "seq2seq-lm": ("t5",),
    "image-classification": ("swinv2", "swiftformer"),
    "ctc": ("wav2vec2", "sew-d"),
    "speech-seq2seq": ("whisper",),
    "image-text-contrastive": ("blip", "clip"),
}


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.linalg.lu_factor(x @ x.T)[0] @ x)


def test_an_operator_without_a_kind_is_named(script: Any) -> None:
    def batch() -> dict[str, torch.Tensor]:
        return {"x": torch.randn(8, 8), "y": torch.zeros(8).long()}

    assert "linalg_lu_factor_ex" in script.unknown(lambda: Odd(8, 10), batch, script.class_loss)
    assert script.unknown(lambda: nn.Linear(8, 10), batch, script.class_loss) == ()


def test_the_gradient_of_a_squared_error_and_filling_by_a_mask_have_kinds(script: Any) -> None:
    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = module(batch["x"])
        return nn.functional.mse_loss(found.masked_fill_(batch["x"] > 0, 0.0), torch.zeros_like(found))

    assert script.unknown(lambda: nn.Linear(8, 8), lambda: {"x": torch.randn(8, 8)}, loss) == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", CLASSIFIERS)
def test_classifiers_of_other_libraries_have_no_unknown_operators(script: Any, library: str) -> None:
    runs = dict(getattr(script, library)())

    assert {name: runs[name]() for name in CLASSIFIERS[library]} == dict.fromkeys(CLASSIFIERS[library], ())


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("task", CONFIGS)
def test_architectures_of_transformers_have_no_unknown_operators(script: Any, task: str) -> None:
    known = importlib.import_module("transformers").CONFIG_MAPPING

    assert {kind: script.of_config(known[kind], task) for kind in CONFIGS[task]} == dict.fromkeys(CONFIGS[task], ())
