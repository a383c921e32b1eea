"""RegNets with the widths of their paper and of timm: those that torchvision does not name, or rounds otherwise.

Cases name them as files of models: ``benchmarks/regnets.py:x_4gf``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.regnet import BlockParams, RegNet

CLASSES = 1000


def build(depths: list[int], widths: list[int], group: int, se_ratio: float | None = None) -> Any:
    """Return a RegNet of four stages with groups of so many channels, its batches and its loss."""
    params = BlockParams(depths, widths, [group] * 4, [1.0] * 4, [2] * 4, se_ratio)
    return RegNet(params, num_classes=CLASSES), batch, loss


def batch(samples: int) -> dict[str, Tensor]:
    """Return images and labels."""
    return {"images": torch.randn(samples, 3, 224, 224), "labels": torch.randint(CLASSES, (samples,))}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(module(batch["images"]), batch["labels"])


x_200mf = partial(build, [1, 1, 4, 7], [24, 56, 152, 368], 8)
x_400mf = partial(build, [1, 2, 7, 12], [32, 64, 160, 384], 16)
x_600mf = partial(build, [1, 3, 5, 7], [48, 96, 240, 528], 24)
x_4gf = partial(build, [2, 5, 14, 2], [80, 240, 560, 1360], 40)
x_6_4gf = partial(build, [2, 4, 10, 1], [168, 392, 784, 1624], 56)
x_12gf = partial(build, [2, 5, 11, 1], [224, 448, 896, 2240], 112)
y_200mf = partial(build, [1, 1, 4, 7], [24, 56, 152, 368], 8, 0.25)
y_600mf = partial(build, [1, 3, 7, 4], [48, 112, 256, 608], 16, 0.25)
y_800mf = partial(build, [1, 3, 8, 2], [64, 128, 320, 768], 16, 0.25)
y_4gf = partial(build, [2, 6, 12, 2], [128, 192, 512, 1088], 64, 0.25)
y_6_4gf = partial(build, [2, 7, 14, 2], [144, 288, 576, 1296], 72, 0.25)
y_8gf = partial(build, [2, 4, 10, 1], [168, 448, 896, 2016], 56, 0.25)
y_12gf = partial(build, [2, 5, 11, 1], [224, 448, 896, 2240], 112, 0.25)
