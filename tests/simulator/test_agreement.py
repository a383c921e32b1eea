"""The simulated peak against the peak of the CPU's allocator, on real architectures at small sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.measuring.meters.meter import Meter
from actbench.scheme.microbatches import Batch
from actbench.simulator import profiles
from actbench.simulator.simulated import SimulatedMeter

BATCH, ROWS, WORDS = 2, 32, 1000
TOLERANCE = 0.02
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}

Built = tuple[nn.Module, Callable[[], Batch], Callable[[nn.Module, Batch], torch.Tensor]]


def class_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def own_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return module(**batch).loss


def resnet18() -> Built:
    def batch() -> Batch:
        return {"x": torch.randn(BATCH, 3, 64, 64), "y": torch.randint(0, 1000, (BATCH,))}

    return torchvision.models.resnet18(), batch, class_loss


def roberta(attention: str) -> Built:
    config = transformers.RobertaConfig(**SIZES, vocab_size=WORDS, attn_implementation=attention)

    def batch() -> Batch:
        words = torch.randint(5, WORDS, (BATCH, ROWS))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.zeros(BATCH).long()}

    return transformers.RobertaForSequenceClassification(config).train(), batch, own_loss


def gpt2(attention: str) -> Built:
    config = transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, vocab_size=WORDS, bos_token_id=0, eos_token_id=0, attn_implementation=attention
    )

    def batch() -> Batch:
        words = torch.randint(0, WORDS, (BATCH, ROWS))
        return {"input_ids": words, "labels": words}

    return transformers.GPT2LMHeadModel(config).train(), batch, own_loss


def vit(attention: str) -> Built:
    config = transformers.ViTConfig(**SIZES, image_size=64, patch_size=16, attn_implementation=attention)

    def batch() -> Batch:
        return {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.zeros(BATCH).long()}

    return transformers.ViTForImageClassification(config).train(), batch, own_loss


MODELS = {
    "resnet18": resnet18,
    "roberta-eager": lambda: roberta("eager"),
    "roberta-sdpa": lambda: roberta("sdpa"),
    "gpt2-eager": lambda: gpt2("eager"),
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "vit-eager": lambda: vit("eager"),
    "vit-sdpa": lambda: vit("sdpa"),
}


QUICK = {"resnet18"}  # test_bench.py has attention


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, build in MODELS.items()],
)
def test_the_simulated_peak_is_that_of_the_allocator(build: Callable[[], Built], step_of) -> None:
    def reading(meter: Meter):
        module, batch, loss = build()
        return meter.memory(step_of(meter, module, batch, loss))

    measured, simulated = reading(CpuMeter()), reading(SimulatedMeter(profiles.get("cpu")))

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=TOLERANCE)
    assert simulated.activation_bytes == pytest.approx(measured.activation_bytes, rel=TOLERANCE)
    assert simulated.weights_bytes == measured.weights_bytes
    assert simulated.gradients_bytes == measured.gradients_bytes
    assert simulated.optimizer_bytes == measured.optimizer_bytes


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("build", [MODELS["roberta-eager"], MODELS["roberta-sdpa"]], ids=["eager", "sdpa"])
def test_a_cuda_profile_keeps_scores_only_where_attention_is_eager(build: Callable[[], Built], step_of) -> None:
    rows, heads, layers = ROWS, 4, 2
    readings = {}
    for name in ("cpu", "cuda-16gib"):
        module, batch, loss = build()
        meter = SimulatedMeter(profiles.get(name))
        readings[name] = meter.memory(step_of(meter, module, batch, loss)).activation_bytes

    scores = layers * BATCH * heads * rows * rows
    if "eager" in module.config._attn_implementation:
        assert readings["cpu"] - readings["cuda-16gib"] >= scores * 3  # dropout masks: one byte in place of four
    else:
        assert readings["cpu"] - readings["cuda-16gib"] >= scores * 4 * 2
