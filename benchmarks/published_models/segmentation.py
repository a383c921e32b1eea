"""Networks that label each pixel, with a second loss at an earlier layer: FCNs, PSPNets, UPerNets and a UNet."""

from __future__ import annotations

from collections.abc import Callable
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


class Trunk(nn.Module):
    """A ResNet with a stem of three convolutions or one; dilated, its last two stages keep the size of the second.

    Attributes:
        widths: Channels of its stages.
    """

    def __init__(self, backbone: str, deep: bool = True, dilated: bool = True) -> None:
        super().__init__()
        resnet = getattr(torchvision.models, backbone)(weights=None)
        plain = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu)
        stem = nn.Sequential(layer(3, 32, stride=2), layer(32, 32), layer(32, 64)) if deep else plain
        self.stem = nn.Sequential(stem, nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList([resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4])
        last = self.stages[-1][-1]
        width = (last.conv3 if hasattr(last, "conv3") else last.conv2).out_channels
        self.widths = [width // 8, width // 4, width // 2, width]
        for stage, dilation in zip(self.stages[2:], (2, 4), strict=True) if dilated else ():
            for convolution in (each for each in stage.modules() if isinstance(each, nn.Conv2d)):
                convolution.stride = (1, 1)
                if convolution.kernel_size == (3, 3):
                    convolution.dilation = convolution.padding = (dilation, dilation)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return what each stage gives."""
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class Headed(nn.Module):
    """A ResNet with a head on its stages, and one on the last but one."""

    def __init__(self, trunk: Trunk, head: nn.Module, classes: int = 19) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head
        *_, inputs, last = trunk.widths
        self.classifier = classifier(last // 4, classes)
        self.aux = nn.Sequential(layer(inputs, inputs // 4), *classifier(inputs // 4, classes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads."""
        stages = self.trunk(x)
        return self.classifier(self.head(stages)), self.aux(stages[2])


def enlarged(x: Tensor, like: Tensor) -> Tensor:
    """Return images of the size of others."""
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class FcnHead(nn.Module):
    """Two convolutions, and one of their result beside their input."""

    def __init__(self, widths: list[int], width: int = 0) -> None:
        super().__init__()
        inputs, width = widths[-1], width or widths[-1] // 4
        self.convs = nn.Sequential(layer(inputs, width), layer(width, width))
        self.cat = layer(inputs + width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return ``width`` channels."""
        found: Tensor = self.cat(torch.cat([stages[-1], self.convs(stages[-1])], 1))
        return found


class PspHead(nn.Module):
    """Means over parts of the image, of four sizes, beside the input, and a convolution of all."""

    def __init__(self, widths: list[int], width: int = 0) -> None:
        super().__init__()
        inputs, width = widths[-1], width or widths[-1] // 4
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(parts), layer(inputs, width, 1)) for parts in (1, 2, 3, 6)
        )
        self.bottleneck = layer(inputs + 4 * width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return ``width`` channels."""
        x = stages[-1]
        found: Tensor = self.bottleneck(torch.cat([x, *(enlarged(pool(x), x) for pool in self.pools)], 1))
        return found


class UperHead(nn.Module):
    """A pyramid of all stages above the means of :class:`PspHead`, and a convolution of all of its levels."""

    def __init__(self, widths: list[int], width: int = 0) -> None:
        super().__init__()
        width = width or widths[-1] // 4
        self.psp = PspHead(widths, width)
        self.sides = nn.ModuleList(layer(each, width, 1) for each in widths[:-1])
        self.levels = nn.ModuleList(layer(width, width) for _ in widths[:-1])
        self.bottleneck = layer(len(widths) * width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return ``width`` channels, in the size of the first stage."""
        found = [side(x) for side, x in zip(self.sides, stages, strict=False)] + [self.psp(stages)]
        for level in (2, 1, 0):
            found[level] = found[level] + enlarged(found[level + 1], found[level])
        found = [level(x) for level, x in zip(self.levels, found, strict=False)] + found[-1:]
        joined: Tensor = self.bottleneck(torch.cat([found[0], *(enlarged(x, found[0]) for x in found[1:])], 1))
        return joined


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


def headed(
    head: Callable[[list[int]], nn.Module],
    backbone: str,
    height: int = 512,
    width: int = 1024,
    deep: bool = True,
    classes: int = 19,
) -> Any:
    """Return a network, with batches of crops, its loss and its optimizer."""
    trunk = Trunk(backbone, deep, dilated=head is not UperHead)
    return Headed(trunk, head(trunk.widths), classes), partial(_batch, height, width, classes), loss, sgd


fcn_r50 = partial(headed, FcnHead, "resnet50")
fcn_r101 = partial(headed, FcnHead, "resnet101")
psp_r18 = partial(headed, PspHead, "resnet18")
psp_r50 = partial(headed, PspHead, "resnet50")
psp_r101 = partial(headed, PspHead, "resnet101")
psp_r18b = partial(headed, PspHead, "resnet18", deep=False)
psp_r50b = partial(headed, PspHead, "resnet50", deep=False)
psp_r18_769 = partial(headed, PspHead, "resnet18", 769, 769)
psp_r50_769 = partial(headed, PspHead, "resnet50", 769, 769)
uper_r50 = partial(headed, UperHead, "resnet50")
uper_r101 = partial(headed, UperHead, "resnet101")
uper_r50_ade = partial(headed, UperHead, "resnet50", 512, 512, classes=150)
uper_r101_ade = partial(headed, UperHead, "resnet101", 512, 512, classes=150)


def torchvision_fcn_r50() -> Any:
    """Return torchvision's FCN with crops of 480 pixels."""
    models = torchvision.models.segmentation
    model = models.fcn_resnet50(weights=None, weights_backbone=None, num_classes=21, aux_loss=True)
    return model, partial(_batch, 480, 480, 21), torchvision_loss, sgd
