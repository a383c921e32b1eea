"""Networks that label each pixel, with a second loss at an earlier layer: FCNs and a UNet."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F


def layer(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Return a convolution, its norm and an activation in place."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def classifier(inputs: int, outputs: int) -> nn.Sequential:
    """Return the last layer, behind dropout of whole channels."""
    return nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(inputs, outputs, 1))


class UNet(nn.Module):
    """UNet-S5-D16: five stages down, four up, with heads on the last two."""

    def __init__(self, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.MaxPool2d(2) if stage else nn.Identity(),
                layer(widths[stage - 1] if stage else 3, widths[stage]),
                layer(widths[stage], widths[stage]),
            )
            for stage in range(5)
        )
        stages = range(4, 0, -1)
        self.up = nn.ModuleList(layer(widths[stage], widths[stage - 1], 1) for stage in stages)
        self.joined = nn.ModuleList(
            nn.Sequential(layer(2 * widths[stage - 1], widths[stage - 1]), layer(widths[stage - 1], widths[stage - 1]))
            for stage in stages
        )
        self.head = nn.Sequential(layer(width, width), *classifier(width, classes))
        self.aux = nn.Sequential(layer(2 * width, width), *classifier(width, classes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads."""
        before = []
        for down in self.down:
            x = down(x)
            before.append(x)
        after = [x]
        for up, joined, beside in zip(self.up, self.joined, before[-2::-1], strict=True):
            x = up(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))
            x = joined(torch.cat([beside, x], 1))
            after.append(x)
        return self.head(after[-1]), self.aux(after[-2])


class Fcn(nn.Module):
    """FCN-V1c-D8: a ResNet whose last stages are dilated, and heads on its last two."""

    def __init__(self, backbone: str, classes: int = 19) -> None:
        super().__init__()
        dilated = [False, True, True]
        resnet = getattr(torchvision.models, backbone)(weights=None, replace_stride_with_dilation=dilated)
        self.stem = nn.Sequential(layer(3, 32, stride=2), layer(32, 32), layer(32, 64), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList([resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4])
        self.convs, self.cat = nn.Sequential(layer(2048, 512), layer(512, 512)), layer(2560, 512)
        self.head, self.aux = classifier(512, classes), nn.Sequential(layer(1024, 256), *classifier(256, classes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads."""
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return self.head(self.cat(torch.cat([x, self.convs(x)], 1))), self.aux(found[2])


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the losses of both heads, from logits enlarged to the image."""
    labels = batch["labels"]
    main, aux = (
        F.cross_entropy(
            F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False),
            labels,
            ignore_index=255,
        )
        for logits in module(batch["images"])
    )
    return main + 0.4 * aux


def torchvision_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the losses of both heads of a model of torchvision."""
    found, labels = module(batch["images"]), batch["labels"]
    main, aux = (F.cross_entropy(found[name], labels, ignore_index=255) for name in ("out", "aux"))
    return main + 0.5 * aux


def _batch(height: int, width: int, classes: int, samples: int) -> dict[str, Tensor]:
    images, labels = torch.randn(samples, 3, height, width), torch.randint(classes, (samples, height, width))
    return {"images": images, "labels": labels}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def unet_128() -> Any:
    """Return the UNet with crops of 128 pixels."""
    return UNet(), partial(_batch, 128, 128, 2), loss, sgd


def fcn(backbone: str) -> Any:
    """Return an FCN with crops of 512 x 1024 pixels."""
    return Fcn(backbone), partial(_batch, 512, 1024, 19), loss, sgd


fcn_r50 = partial(fcn, "resnet50")
fcn_r101 = partial(fcn, "resnet101")


def torchvision_fcn_r50() -> Any:
    """Return torchvision's FCN with crops of 480 pixels."""
    models = torchvision.models.segmentation
    model = models.fcn_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True)
    return model, partial(_batch, 480, 480, 21), torchvision_loss, sgd
