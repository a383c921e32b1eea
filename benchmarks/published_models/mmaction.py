"""Networks of mmaction2 that name an action in clips of video, by name.

``tsn_r50_8x224_400`` is a TSN on a ResNet-50 for 8 frames of 224 pixels and 400 actions. ``tsm``, ``slowonly``,
``i3d``, ``r2plus1d`` and ``slowfast`` are called likewise, where ``nl`` stands for layers that attend to all pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torchvision
from segmentation import sgd
from torch import Tensor, nn
from torch.nn import functional as F

Convolution = Callable[..., nn.Module]
_BLOCKS = {34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_ATTENDING = ((), (0, 2), (0, 2, 4), ())
"""Blocks of each stage behind which all pixels are attended to."""


class Shifted(nn.Module):
    """A convolution before which an eighth of the channels comes from the next frame, and one from the frame before."""

    def __init__(self, convolution: nn.Module, frames: int) -> None:
        super().__init__()
        self.convolution, self.frames = convolution, frames

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolved shifted frames."""
        clips = x.view(-1, self.frames, x.shape[1], x.shape[2] * x.shape[3])
        fold = x.shape[1] // 8
        left, middle, right = clips[:, :, :fold], clips[:, :, fold : 2 * fold], clips[:, :, 2 * fold :]
        blank = (left - left)[:, :1]
        left = torch.cat((left[:, 1:], blank), 1)
        blank = (middle - middle)[:, :1]
        middle = torch.cat((blank, middle[:, :-1]), 1)
        found: Tensor = self.convolution(torch.cat((left, middle, right), 2).view_as(x))
        return found


class NonLocal(nn.Module):
    """Attention of all pixels of a clip to a quarter of them, added to its input."""

    def __init__(self, width: int, mode: str, scaled: bool) -> None:
        super().__init__()
        inner, self.mode, self.scaled = width // 2, mode, scaled
        pool = nn.MaxPool3d((1, 2, 2))
        self.value = nn.Sequential(nn.Conv3d(width, inner, 1), pool)
        plain = mode == "gaussian"
        self.query = nn.Identity() if plain else nn.Conv3d(width, inner, 1)
        self.key = pool if plain else nn.Sequential(nn.Conv3d(width, inner, 1), pool)
        self.out = nn.Sequential(nn.Conv3d(inner, width, 1, bias=False), nn.BatchNorm3d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with what its pixels gather."""
        value = self.value(x).flatten(2).permute(0, 2, 1)
        query, key = self.query(x).flatten(2).permute(0, 2, 1), self.key(x).flatten(2)
        scores = torch.matmul(query, key)
        if self.mode == "dot":
            scores /= scores.shape[-1]
        else:
            if self.scaled and self.mode == "embedded":
                scores /= query.shape[-1] ** 0.5
            scores = scores.softmax(-1)
        found = torch.matmul(scores, value).permute(0, 2, 1).contiguous().reshape(len(x), -1, *x.shape[2:])
        return x + self.out(found)


class OfFrames(nn.Module):
    """A layer on clips, given their frames."""

    def __init__(self, layer: nn.Module, frames: int) -> None:
        super().__init__()
        self.layer, self.frames = layer, frames

    def forward(self, x: Tensor) -> Tensor:
        """Return frames."""
        clips = x.view(-1, self.frames, *x.shape[1:]).transpose(1, 2).contiguous()
        found: Tensor = self.layer(clips).transpose(1, 2).contiguous().view_as(x)
        return found


class Summed(nn.Module):
    """A block whose two ways are added out of place."""

    def __init__(self, body: nn.Module, beside: nn.Module) -> None:
        super().__init__()
        self.body, self.beside = body, beside

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        return F.relu(self.body(x) + self.beside(x), inplace=True)


def frames_trunk(depth: int, channels: int, frames: int, shifts: bool, mode: str) -> nn.Module:
    """Return a ResNet of single frames, which shifts channels between them if ``shifts``."""
    resnet = getattr(torchvision.models, f"resnet{depth}")(weights=None)
    stem = [nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    every = 2 if depth > 100 else 1
    stages = []
    for stage, attending in zip((resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4), _ATTENDING, strict=True):
        for place, block in enumerate(stage):
            first = Shifted(block.conv1, frames) if shifts and place % every == 0 else block.conv1
            parts = (first, block.bn1, block.relu, block.conv2, block.bn2, block.relu, block.conv3, block.bn3)
            stages.append(Summed(nn.Sequential(*parts), block.downsample or nn.Identity()))
            if mode and place in attending:
                stages.append(OfFrames(NonLocal(block.bn3.num_features, mode, False), frames))
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *stages)


class OneConvolution(nn.Sequential):
    """A convolution of space and time."""

    def __init__(self, inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int]) -> None:
        super().__init__(_convolution(inputs, outputs, kernel, stride))


class TwoConvolutions(nn.Sequential):
    """A convolution of space, its norm and activation, and one of time."""

    def __init__(self, inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int]) -> None:
        time, *space = kernel
        area = space[0] * space[1]
        inner = int(3 * inputs * outputs * area / (inputs * area + 3 * outputs))
        super().__init__(
            _convolution(inputs, inner, (1, *space), (1, *stride[1:])),
            nn.BatchNorm3d(inner),
            nn.ReLU(inplace=True),
            _convolution(inner, outputs, (time, 1, 1), (stride[0], 1, 1)),
        )


def _convolution(inputs: int, outputs: int, kernel: Sequence[int], stride: Sequence[int]) -> nn.Module:
    padding = [each // 2 for each in kernel]
    return nn.Conv3d(inputs, outputs, tuple(kernel), tuple(stride), tuple(padding), bias=False)


class Clips(nn.Module):
    """A ResNet of clips."""

    def __init__(
        self,
        depth: int,
        first: tuple[int, int],
        inflated: Sequence[Sequence[int]],
        *,
        base: int = 64,
        channels: int = 3,
        beside: int = 0,
        pool: tuple[int, int] = (1, 0),
        strides: Sequence[int] = (1, 1, 1, 1),
        made: Convolution = OneConvolution,
        mode: str = "",
    ) -> None:
        super().__init__()
        kernel, stride = first
        begun = made(channels, base, (kernel, 7, 7), (stride, 2, 2))
        self.stem = nn.Sequential(
            begun, nn.BatchNorm3d(base), nn.ReLU(inplace=True), nn.MaxPool3d((1, 3, 3), (pool[0], 2, 2), (0, 1, 1))
        )
        self.stages, inputs = nn.ModuleList(), base + 2 * beside
        wide = 4 if depth >= 50 else 1
        for stage, blocks in enumerate(_BLOCKS[depth]):
            width = base * 2**stage
            parts: list[nn.Module] = []
            for place in range(blocks):
                space = 2 if place == 0 and stage else 1
                across = (1 if place else strides[stage], space, space)
                time = 3 if inflated[stage][place % len(inflated[stage])] else 1
                parts.append(self._block(inputs, width, across, time, wide, made))
                inputs = width * wide
                if mode and place in _ATTENDING[stage]:
                    parts.append(NonLocal(inputs, mode, True))
            if stage == 0 and pool[1]:
                parts.append(nn.MaxPool3d((2, 1, 1), (2, 1, 1)))
            self.stages.append(nn.Sequential(*parts))
            inputs += 2 * beside * wide * 2**stage

    @staticmethod
    def _block(inputs: int, width: int, across: Any, time: int, wide: int, made: Convolution) -> nn.Module:
        outputs, one = width * wide, (1, 1, 1)
        norm, active = nn.BatchNorm3d, partial(nn.ReLU, inplace=True)
        body = (
            [made(inputs, width, (3, 3, 3), across), norm(width), active(), made(width, width, (3, 3, 3), one)]
            if wide == 1
            else [
                *(made(inputs, width, (time, 1, 1), one), norm(width), active()),
                *(made(width, width, (1, 3, 3), across), norm(width), active()),
                made(width, outputs, one, one),
            ]
        )
        same = inputs == outputs and across == one
        beside = nn.Identity() if same else nn.Sequential(made(inputs, outputs, one, across), norm(outputs))
        return Summed(nn.Sequential(*body, norm(outputs)), beside)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last stage."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


class SlowFast(nn.Module):
    """A network of few frames, and one with an eighth of its channels of more frames, which joins it at each stage."""

    def __init__(self, depths: tuple[int, int], apart: int, ratio: int, kernel: int) -> None:
        super().__init__()
        self.apart, self.between = apart, apart // ratio
        self.slow = Clips(depths[0], (1, 1), ((0,), (0,), (1,), (1,)), beside=8)
        self.fast = Clips(depths[1], (5, 1), ((1,),) * 4, base=8)
        widths = (8, 32, 64, 128)
        self.joins = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(width, 2 * width, (kernel, 1, 1), (ratio, 1, 1), (kernel // 2, 0, 0), bias=False),
                nn.BatchNorm3d(2 * width),
                nn.ReLU(inplace=True),
            )
            for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of both."""
        slow = self.slow.stem(F.interpolate(x, scale_factor=(1 / self.apart, 1.0, 1.0), mode="nearest"))
        fast = self.fast.stem(F.interpolate(x, scale_factor=(1 / self.between, 1.0, 1.0), mode="nearest"))
        slow = torch.cat((slow, self.joins[0](fast)), 1)
        for place, (stage, beside) in enumerate(zip(self.slow.stages, self.fast.stages, strict=True)):
            slow, fast = stage(slow), beside(fast)
            if place < 3:
                slow = torch.cat((slow, self.joins[place + 1](fast)), 1)
        return torch.cat((F.adaptive_avg_pool3d(slow, 1), F.adaptive_avg_pool3d(fast, 1)), 1)


def c3d() -> nn.Module:
    """Return eight convolutions of 3x3x3 pixels without norms, and two linear layers; its ReLUs are in place."""
    parts: list[nn.Module] = []
    for inputs, outputs, pool in (
        *((3, 64, (1, 2, 2)), (64, 128, (2, 2, 2)), (128, 256, None), (256, 256, (2, 2, 2))),
        *((256, 512, None), (512, 512, (2, 2, 2)), (512, 512, None), (512, 512, (2, 2, 2))),
    ):
        parts += [nn.Conv3d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        if pool:
            parts.append(nn.MaxPool3d(pool, pool, (0, 1, 1) if len(parts) > 18 else 0))
    wide = (nn.Linear(8192, 4096), nn.Threshold(0, 0), nn.Dropout(0.5), nn.Linear(4096, 4096), nn.Threshold(0, 0))
    return nn.Sequential(*parts, nn.Flatten(), *wide)


class Recognizer(nn.Module):
    """A network of frames or clips, and a linear layer on its means."""

    def __init__(self, trunk: nn.Module, width: int, actions: int, frames: int) -> None:
        super().__init__()
        self.trunk, self.frames = trunk, frames
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(width, actions))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each clip."""
        found = self.trunk(x.flatten(0, 1))
        means = found.flatten(2).mean(-1) if found.dim() > 2 else found
        logits = self.head(means)
        return logits.view(-1, self.frames, logits.shape[1]).mean(1) if self.frames else logits


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of the actions."""
    return F.cross_entropy(module(batch["images"]), batch["labels"])


def _batch(shape: Sequence[int], actions: int, samples: int) -> dict[str, Tensor]:
    return {"images": torch.randn(samples, *shape), "labels": torch.randint(actions, (samples,))}


_NAME = re.compile(
    r"(tsn|tsm|slowonly|i3d|r2plus1d|c3d|slowfast4|slowfast8)(?:nl([a-z]+))?_r(\d+)(?:r(\d+))?(flow)?_(\d+)x(\d+)_(\d+)"
)
_I3D = ((1, 1, 1), (1, 0, 1, 0), (1, 0, 1, 0, 1, 0), (0, 1, 0))
_SLOWFAST = {"slowfast4": (8, 8, 5), "slowfast8": (4, 4, 7)}


def network(name: str) -> Any:
    """Return a network, with batches of clips, its loss and its optimizer."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    kind, mode, *depths, flow, frames, side, actions = found.groups()
    depth, frames, side, actions = int(depths[0]), int(frames), int(side), int(actions)
    mode = mode or ""
    if kind in ("tsn", "tsm"):
        channels = 10 if flow else 3
        trunk = frames_trunk(depth, channels, frames, kind == "tsm", mode)
        shape: tuple[int, ...] = (frames, channels, side, side)
        return Recognizer(trunk, 2048, actions, frames), partial(_batch, shape, actions), loss, sgd
    channels = 2 if flow else 3
    if kind == "slowonly":
        trunk = Clips(depth, (1, 1), ((0,), (0,), (1,), (1,)), channels=channels, mode=mode)
    elif kind == "i3d":
        trunk = Clips(depth, (5, 2), _I3D, pool=(2, 1), mode=mode)
    elif kind == "r2plus1d":
        trunk = Clips(depth, (3, 1), ((1,),) * 4, strides=(1, 2, 2, 2), made=TwoConvolutions)
    elif kind == "c3d":
        trunk = c3d()
    else:
        trunk = SlowFast((depth, int(depths[1] or depth)), *_SLOWFAST[kind])
    width = {"r2plus1d": 512, "c3d": 4096, "slowonly": 2048, "i3d": 2048}.get(kind, 2304)
    shape = (1, channels, frames, side, side)
    return Recognizer(trunk, width, actions, 0), partial(_batch, shape, actions), loss, sgd


def __getattr__(name: str) -> Any:
    if not _NAME.fullmatch(name):
        raise AttributeError(name)
    return partial(network, name)
