"""Architectures of timm: each scheme converts them, and gradients are those of the same model with torch's GELUs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers import activations as layers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import QuickGELUActivation

import actbench
from actbench.tools.convert.model import conversion_of

TINY: dict[str, Any] = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": TINY,
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "deit3_small_patch16_224": TINY,
    "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "efficientformer_l1": {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 32, 64)},
    "efficientformerv2_s0": {"depths": (1, 1, 1, 1), "img_size": 64},
    "tinynet_e": {},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "ghostnet_050": {},
    "levit_128s": {},
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {},
    "regnety_002": {},
    "resmlp_12_224": {"img_size": 32},
    "resnet10t": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (1, 1, 2, 1), "window_size": 2, "embed_dim": 32},
    "vit_base_patch16_clip_quickgelu_224": TINY,
    "vit_tiny_patch16_224": TINY,
    "xcit_nano_12_p16_224": {"depth": 2},
}
PIXELS = {"efficientformer_l1": 224, "levit_128s": 224, "xcit_nano_12_p16_224": 32}
OF_TORCH: dict[type[nn.Module], Callable[[], nn.Module]] = {
    layers.GELU: nn.GELU,
    layers.GELUTanh: lambda: nn.GELU("tanh"),
    layers.QuickGELU: QuickGELUActivation,
}
LEAST = {"fewbit:3": 0.8, "actnn:L3": 0.99, "gact:L2,probes=4": 0.9}
"""The least cosine of the gradient and the exact one."""
FINER = {"actnn:L3": "actnn:L3,bits=8"}
"""What is compared with the exact gradient: two bits are noise of up to four times the gradient of four images."""


def with_layers_of_torch(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in OF_TORCH:
                setattr(parent, name, OF_TORCH[type(child)]())
    return model


def gradient(model: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(1)
    F.cross_entropy(model(images), torch.arange(len(images))).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    settings = ARCHITECTURES[name]
    pixels = PIXELS.get(name, settings.get("img_size", 64))
    return timm.create_model(name, num_classes=10, **settings).train(), torch.randn(4, 3, pixels, pixels)


QUICK = {
    ("convnext_atto", "fewbit:3"),
    ("convnext_atto", "checkpoint"),
    ("vit_base_patch16_clip_quickgelu_224", "fewbit:3"),
    ("vit_base_patch16_clip_quickgelu_224", "actnn:L3"),
}


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, marks=[] if (name, spec) in QUICK else pytest.mark.sampled(slow=5))
        for name in ARCHITECTURES
        for spec in (*LEAST, "checkpoint")
    ],
)
def test_the_gradients_are_those_with_torchs_gelus(name: str, spec: str) -> None:
    model, images = built(name)
    twin = with_layers_of_torch(model)
    exact = gradient(copy.deepcopy(model), images)
    converted = actbench.convert(copy.deepcopy(model), spec)
    conversion = conversion_of(converted)
    found = gradient(converted, images)

    assert conversion is not None
    assert conversion.sites
    assert found.isfinite().all()
    if spec == "checkpoint":
        assert torch.equal(found, exact)
    else:
        finer = gradient(actbench.convert(copy.deepcopy(model), FINER[spec]), images) if spec in FINER else found
        assert F.cosine_similarity(finer, exact, 0) > LEAST[spec]
    if any(type(part) in OF_TORCH for part in model.modules()):
        assert torch.equal(found, gradient(actbench.convert(twin, spec), images))


@pytest.mark.parametrize("name", ["convnext_atto", "efficientformerv2_s0", "vit_base_patch16_clip_quickgelu_224"])
@pytest.mark.parametrize("spec", ["fewbit:3", "regelu2", "invact"])
def test_no_gelu_of_timm_is_left_out(name: str, spec: str) -> None:
    model, _ = built(name)
    wanted = {path for path, part in model.named_modules() if type(part) in OF_TORCH}
    conversion = conversion_of(actbench.convert(model, spec))

    assert wanted
    assert conversion is not None
    assert wanted <= {site.path for site in conversion.sites}
