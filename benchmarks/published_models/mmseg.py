"""Networks of mmsegmentation by name: a head, a backbone, the crop and the number of classes.

``psp_r50_d8_512x1024_19`` is a PSPNet on a ResNet-50 with a deep stem whose last stage has an eighth of its image's
size, for crops of 512 x 1024 pixels with 19 classes; ``r50b`` has torchvision's stem. Heads, widths and second losses
are those of its configuration, written from the papers. Before 1.10, torch's ReLU out of place saved its input, as
``threshold`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from segmentation import FcnHead, PspHead, Trunk, enlarged, layer, sgd
from torch import Tensor, nn
from torch.nn import functional as F


def convolved(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a dilated convolution, its norm and an activation in place."""
    padding = kernel // 2 * dilation
    convolution = nn.Conv2d(inputs, outputs, kernel, 1, padding, dilation, groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def separable(inputs: int, outputs: int, dilation: int = 1) -> nn.Sequential:
    """Return a convolution of each channel by itself, and one of single pixels."""
    return nn.Sequential(convolved(inputs, inputs, 3, dilation, inputs), convolved(inputs, outputs, 1))


class Backbone(Trunk):
    """A ResNet whose stages have strides and dilations; a dilated stage begins with half of its dilation.

    The second convolution of a basic block is not dilated.
    """

    def __init__(self, name: str, deep: bool, stride: int, grid: Sequence[int] = ()) -> None:
        super().__init__(name, deep, dilated=False)
        for stage, (strides, dilation) in enumerate(_DILATIONS[stride], start=2):
            for place, block in enumerate(self.stages[stage]):
                first = place == 0
                for convolution in (each for each in block.modules() if isinstance(each, nn.Conv2d)):
                    if first and convolution.stride != (1, 1):
                        convolution.stride = (strides, strides)
                basic = not hasattr(block, "conv3")
                spread = block.conv1 if basic else block.conv2
                step = max(dilation // 2, 1) if first else dilation
                step = grid[place] if grid and stage == 3 else step
                spread.dilation = spread.padding = (step, step)


_DILATIONS = {8: ((1, 2), (1, 4)), 16: ((2, 1), (1, 2)), 32: ((2, 1), (2, 1))}


class Classes(nn.Module):
    """Dropout of whole channels and a convolution to the classes."""

    def __init__(self, inputs: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(dropout) if dropout else nn.Identity()
        self.convolution = nn.Conv2d(inputs, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        found: Tensor = self.convolution(self.dropout(x))
        return found


class AsppHead(nn.Module):
    """DeepLabV3: convolutions of several dilations beside the mean of the image, and one of all."""

    def __init__(self, widths: list[int], dilations: Sequence[int] = (1, 12, 24, 36), width: int = 0) -> None:
        super().__init__()
        inputs, width = widths[-1], width or widths[-1] // 4
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), layer(inputs, width, 1))
        self.branches = nn.ModuleList(self._branch(inputs, width, dilation) for dilation in dilations)
        self.bottleneck = layer(5 * width, width)

    def _branch(self, inputs: int, width: int, dilation: int) -> nn.Module:
        return convolved(inputs, width, 1 if dilation == 1 else 3, dilation)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        x = stages[-1]
        found: Tensor = self.bottleneck(
            torch.cat([enlarged(self.mean(x), x), *[branch(x) for branch in self.branches]], 1)
        )
        return found


class SeparableAsppHead(AsppHead):
    """DeepLabV3+: the same with separable convolutions, joined with the first stage in its size."""

    def __init__(self, widths: list[int], dilations: Sequence[int] = (1, 12, 24, 36), width: int = 0) -> None:
        super().__init__(widths, dilations, width)
        width = width or widths[-1] // 4
        self.side = layer(widths[0], 48, 1)
        self.joined = nn.Sequential(separable(width + 48, width), separable(width, width))

    def _branch(self, inputs: int, width: int, dilation: int) -> nn.Module:
        return convolved(inputs, width, 1) if dilation == 1 else separable(inputs, width, dilation)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage, in the size of the first."""
        found, side = super().forward(stages), self.side(stages[0])
        return self.joined(torch.cat([enlarged(found, side), side], 1))


class Attention(nn.Module):
    """Attention of pixels to pixels, with the whole matrix of scores.

    Attributes:
        scaled: Whether a scaled copy of the scores is made.
    """

    def __init__(
        self,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        out: nn.Module | None = None,
        pool: Callable[[Tensor], Tensor] | None = None,
        scaled: bool = True,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = query, key, value, out or nn.Identity()
        self.pool, self.scaled = pool, scaled

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        """Return what the pixels of ``low`` gather from those of ``high``."""
        query = self.query(low).flatten(2).transpose(1, 2).contiguous()
        key, value = self.key(high), self.value(high)
        key, value = (self.pool(key), self.pool(value)) if self.pool else (key, value)
        value = value.flatten(2).transpose(1, 2).contiguous()
        scores = torch.matmul(query, key.flatten(2))
        if self.scaled:
            scores = query.shape[-1] ** -0.5 * scores
        found = torch.matmul(F.softmax(scores, -1), value).transpose(1, 2).contiguous()
        out: Tensor = self.out(found.reshape(len(low), -1, *low.shape[2:]))
        return out


class AnnHead(nn.Module):
    """Attention to means over parts of the image, of the last stage by the last but one and then of itself."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        *_, low, high = widths
        width, inner = high // 4, 256
        pools = [nn.AdaptiveAvgPool2d(parts) for parts in (1, 3, 6, 8)]

        def pooled(x: Tensor) -> Tensor:
            return torch.cat([pool(x).flatten(2) for pool in pools], 2)

        one = partial(nn.Conv2d, kernel_size=1)
        self.fusion = Attention(layer(low, inner, 1), layer(high, inner, 1), one(high, inner), one(inner, high), pooled)
        self.fused = nn.Sequential(nn.Conv2d(2 * high, high, 1, bias=False), nn.BatchNorm2d(high))
        self.dropout = nn.Dropout2d(0.1)
        self.bottleneck = layer(high, width)
        both = layer(width, inner, 1)
        self.context = Attention(both, both, one(width, inner), one(inner, width), pooled)
        self.joined = layer(2 * width, width, 1)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        low, high = stages[-2:]
        context = torch.stack([self.fusion(low, high)]).sum(0)
        x = self.bottleneck(self.dropout(self.fused(torch.cat([context, high], 1))))
        context = torch.stack([self.context(x, x)]).sum(0)
        return self.joined(torch.cat([context, x], 1))


class AdaptiveContext(nn.Module):
    """Means over parts of the image, weighed for each pixel."""

    def __init__(self, inputs: int, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.pooled, self.reduced = layer(inputs, width, 1), layer(inputs, width, 1)
        self.everywhere, self.weights = layer(width, width, 1), nn.Conv2d(width, parts**2, 1)
        self.residual, self.fused = layer(width, width, 1), layer(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighed means."""
        pooled, x = F.adaptive_avg_pool2d(x, self.parts), self.reduced(x)
        pooled = self.pooled(pooled).flatten(2).transpose(1, 2).contiguous()
        everywhere = F.interpolate(self.everywhere(F.adaptive_avg_pool2d(x, 1)), size=x.shape[2:])
        weights = self.weights(x + everywhere).permute(0, 2, 3, 1).reshape(len(x), -1, self.parts**2)
        found = torch.matmul(torch.sigmoid(weights), pooled).transpose(1, 2).contiguous().view_as(x)
        return self.fused(F.threshold(self.residual(found) + x, 0, 0))


class DynamicFilter(nn.Module):
    """Each channel of each image convolved with a filter made from its means over parts."""

    def __init__(self, inputs: int, width: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.filters, self.reduced = nn.Conv2d(inputs, width, 1), layer(inputs, width, 1)
        self.norm = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolved channels."""
        filters, x = self.filters(F.adaptive_avg_pool2d(x, self.parts)), self.reduced(x)
        channels = x.shape[0] * x.shape[1]
        padded = F.pad(x.view(1, channels, *x.shape[2:]), [self.parts // 2] * 4)
        found = F.conv2d(padded, filters.view(channels, 1, self.parts, self.parts), groups=channels)
        return self.norm(found.view_as(x))


class JoinedHead(nn.Module):
    """Modules beside their input, and a convolution of all: APCNet and DMNet."""

    def __init__(self, widths: list[int], kind: Callable[[int, int, int], nn.Module], parts: Sequence[int]) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.branches = nn.ModuleList(kind(inputs, width, each) for each in parts)
        self.bottleneck = layer(inputs + len(parts) * width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        x = stages[-1]
        return self.bottleneck(torch.cat([x, *[branch(x) for branch in self.branches]], 1))


class BetweenHead(nn.Module):
    """A module between two convolutions, and one of their result beside their input."""

    def __init__(self, widths: list[int], kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.before, self.between, self.after = layer(inputs, width), kind(width), layer(width, width)
        self.cat = layer(inputs + width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        x = stages[-1]
        found = self.after(self.between(self.before(x)))
        return self.cat(torch.cat([x, found], 1))


class NonLocal(nn.Module):
    """Attention of pixels to pixels, added to its input; disentangled with an attention of the whole image."""

    def __init__(self, width: int, disentangled: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(width, width // 2, 1) for _ in range(3))
        self.out = nn.Sequential(nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width))
        self.mask = nn.Conv2d(width, 1, 1) if disentangled else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with what its pixels gather."""
        value = self.value(x).flatten(2).transpose(1, 2)
        query, key = self.query(x).flatten(2).transpose(1, 2), self.key(x).flatten(2)
        if self.mask:
            query -= query.mean(-2, keepdim=True)
            key -= key.mean(-1, keepdim=True)
        scores = torch.matmul(query, key)
        scores /= query.shape[-1] ** 0.5
        if self.mask:
            scores /= 0.05
        found = torch.matmul(scores.softmax(-1), value).transpose(1, 2).contiguous()
        found = found.reshape(len(x), -1, *x.shape[2:])
        if self.mask:
            mask = self.mask(x).flatten(2).softmax(-1)
            found = found + torch.matmul(mask, value).transpose(1, 2).contiguous().reshape(len(x), -1, 1, 1)
        return x + self.out(found)


class GlobalContext(nn.Module):
    """A weighed mean of the image, added to each pixel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask = nn.Conv2d(width, 1, 1)
        inner = width // 4
        self.added = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.LayerNorm([inner, 1, 1]), nn.ReLU(inplace=True), nn.Conv2d(inner, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with its context."""
        mask = self.mask(x).flatten(2).softmax(2).unsqueeze(-1)
        context = torch.matmul(x.flatten(2).unsqueeze(1), mask).view(len(x), -1, 1, 1)
        return x + self.added(context)


class _Across(torch.autograd.Function):
    """Scores of each pixel with those of its row and column, which its own kernel makes without other tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        images, _, height, width = query.shape
        return query.new_zeros(images, height + width - 1, height, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        query, key = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key)


class _Gathered(torch.autograd.Function):
    """What each pixel gathers from its row and column."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights, value)
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, value = ctx.saved_tensors
        return torch.zeros_like(weights), torch.zeros_like(value)


class CrissCross(nn.Module):
    """Attention to the pixels of a row and a column, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(width, each, 1) for each in (width // 8, width // 8, width))
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with what its pixels gather."""
        for _ in range(2):
            weights = F.softmax(_Across.apply(self.query(x), self.key(x)), 1)
            x = self.gamma * _Gathered.apply(weights, self.value(x)) + x
        return x


class DualHead(nn.Module):
    """DANet: attention of pixels beside attention of channels, each with logits of its own."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        one = partial(nn.Conv2d, kernel_size=1)
        self.before, self.after = (nn.ModuleList(layer(each, width) for _ in range(2)) for each in (inputs, width))
        self.pixels = Attention(one(width, 64), one(width, 64), one(width, width), scaled=False)
        self.gammas = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))
        self.classes = nn.ModuleList(Classes(width, classes) for _ in range(3))

    def _channels(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        energy = torch.bmm(flat, flat.transpose(1, 2))
        weights = F.softmax(energy.max(-1, keepdim=True)[0].expand_as(energy) - energy, -1)
        return torch.bmm(weights, flat).view_as(x)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the logits of both together and of each."""
        x = stages[-1]
        pixels = self.before[0](x)
        pixels = self.after[0](self.pixels(pixels, pixels) * self.gammas[0] + pixels)
        first = self.classes[1](pixels)
        channels = self.before[1](x)
        channels = self.after[1](self._channels(channels) * self.gammas[1] + channels)
        second = self.classes[2](channels)
        return [self.classes[0](pixels + channels), first, second]


class EmaHead(nn.Module):
    """EMANet: pixels as sums of 64 bases, found by expectation and maximization without gradients."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        inputs, inner, width = widths[-1], 512, 256
        self.before, self.middle = layer(inputs, inner), nn.Conv2d(inner, inner, 1).requires_grad_(False)
        self.after = nn.Sequential(nn.Conv2d(inner, inner, 1, bias=False), nn.BatchNorm2d(inner))
        self.bottleneck, self.cat = layer(inner, width), layer(inputs + width, width)
        self.bases = nn.Buffer(torch.zeros(1, inner, 64))

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return 256 channels."""
        before = self.before(stages[-1])
        flat = self.middle(before).flatten(2)
        bases = self.bases.repeat(len(flat), 1, 1)
        with torch.no_grad():
            for _ in range(3):
                attention = F.softmax(torch.einsum("bcn,bck->bnk", flat, bases), 2)
                normed = F.normalize(attention, dim=1, p=1)
                bases = F.normalize(torch.einsum("bcn,bnk->bck", flat, normed), dim=1, p=2)
        found = torch.einsum("bck,bnk->bcn", bases, attention).view_as(before)
        found = F.relu(before + self.after(F.relu(found, inplace=True)), inplace=True)
        return self.cat(torch.cat([stages[-1], self.bottleneck(found)], 1))


class EncHead(nn.Module):
    """EncNet: channels weighed by how pixels lie to 32 code words, with a loss on which classes the image has."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.bottleneck, self.project = layer(inputs, width), layer(width, width, 1)
        self.words, self.scale = nn.Parameter(torch.zeros(32, width)), nn.Parameter(torch.zeros(32))
        self.norm = nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(inplace=True))
        self.weights = nn.Sequential(nn.Linear(width, width), nn.Sigmoid())
        self.classes, self.image = Classes(width, classes), nn.Linear(width, classes)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the logits of pixels and of the image."""
        feature = self.bottleneck(stages[-1])
        flat = self.project(feature).flatten(2).transpose(1, 2).contiguous()
        shape = -1, -1, *self.words.shape
        nearness = F.softmax(self.scale * (flat.unsqueeze(2).expand(shape) - self.words).pow(2).sum(3), 2)
        codes = (nearness.unsqueeze(3) * (flat.unsqueeze(2).expand(shape) - self.words)).sum(1)
        code = self.norm(codes).mean(1)
        weighed = F.relu_(feature + feature * self.weights(code).view(*feature.shape[:2], 1, 1))
        return [self.classes(weighed), self.image(code)]


class InterlacedHead(nn.Module):
    """ISANet: attention among pixels 8 apart, then among neighbours, beside their input."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.before, self.joined = layer(inputs, width), layer(2 * width, width, 1)
        self.far, self.near = (self._attention(width) for _ in range(2))

    def _attention(self, width: int) -> nn.Module:
        query, key = (nn.Sequential(layer(width, 256, 1), layer(256, 256, 1)) for _ in range(2))
        return Attention(query, key, nn.Conv2d(width, width, 1), layer(width, width, 1))

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        x = before = self.before(stages[-1])
        images, channels, height, width = x.shape
        down, right = -height % 8, -width % 8
        if down or right:
            x = F.pad(x, [right // 2, right - right // 2, down // 2, down - down // 2])
        rows, columns = x.shape[2] // 8, x.shape[3] // 8
        x = x.view(images, channels, rows, 8, columns, 8).permute(0, 3, 5, 1, 2, 4).reshape(-1, channels, rows, columns)
        x = self.far(x, x)
        x = x.view(images, 8, 8, channels, rows, columns).permute(0, 4, 5, 3, 1, 2).reshape(-1, channels, 8, 8)
        x = self.near(x, x)
        x = x.view(images, rows, columns, channels, 8, 8).permute(0, 3, 1, 4, 2, 5)
        x = x.reshape(images, channels, 8 * rows, 8 * columns)
        if down or right:
            x = x[:, :, down // 2 : down // 2 + height, right // 2 : right // 2 + width]
        return self.joined(torch.cat([x, before], 1))


class _Spread(torch.autograd.Function):
    """Scores of a window around each pixel, written at their places in the image by a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        images, _, height, width = scores.shape
        return scores.new_zeros(images, height * width, height, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return grads[0].new_zeros(scores.shape)


class PsaHead(nn.Module):
    """PSANet: pixels gather from all others and give to all others, in half of the size."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.reduced = nn.ModuleList(layer(inputs, width, 1) for _ in range(2))
        self.scores = nn.ModuleList(
            nn.Sequential(layer(width, width, 1), nn.Conv2d(width, 97 * 97, 1, bias=False)) for _ in range(2)
        )
        wide = nn.Conv2d(2 * width, inputs, 1, padding=1, bias=False)
        self.wide = nn.Sequential(wide, nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.bottleneck = layer(2 * inputs, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        x = stages[-1]
        small = [(each + 1) // 2 for each in x.shape[2:]]
        found = [F.interpolate(reduced(x), size=small, mode="bilinear") for reduced in self.reduced]
        scores = [made(each) for made, each in zip(self.scores, found, strict=True)]
        scores = [_Spread.apply(each) for each in scores]
        scores = [F.softmax(each, 1) for each in scores]
        found = [
            torch.bmm(each.flatten(2), score.flatten(2)).view_as(each) * 1.0
            for each, score in zip(found, scores, strict=True)
        ]
        wide = enlarged(self.wide(torch.cat(found, 1)), x)
        return self.bottleneck(torch.cat([x, wide], 1))


class SpreadFcnHead(nn.Module):
    """FCN-D6: convolutions with a dilation of 6, and one of their result beside their input."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        inputs, width = widths[-1], widths[-1] // 4
        self.convs = nn.Sequential(convolved(inputs, width, 3, 6), convolved(width, width, 3, 6))
        self.cat = layer(inputs + width, width)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return a quarter of the channels of the last stage."""
        return self.cat(torch.cat([stages[-1], self.convs(stages[-1])], 1))


class Stage(nn.Module):
    """One stage of several."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, stages: list[Tensor]) -> Tensor:
        """Return the stage."""
        return stages[self.place]


class Network(nn.Module):
    """A backbone with a head, which ends in logits if it has no ``width``, and a second head."""

    def __init__(
        self, trunk: nn.Module, head: nn.Module, width: int, classes: int, aux: nn.Module | None, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = trunk, head, aux
        self.classifier = Classes(width, classes, dropout) if width else None

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of all heads."""
        stages = self.trunk(x)
        found = self.head(stages)
        found = [self.classifier(found)] if self.classifier else found
        return [*found, self.aux(stages)] if self.aux else found


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the losses of all heads: of pixels from logits enlarged to the image, of points, and of images."""
    labels = batch["labels"]
    total = torch.zeros((), device=labels.device)
    for logits in module(batch["images"]):
        if logits.dim() == 2:
            total = total + F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))
            continue
        if logits.dim() == 3:
            total = total + F.cross_entropy(logits, labels.new_zeros(len(logits), logits.shape[2]))
            continue
        large = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
        each = F.cross_entropy(large, labels, ignore_index=255, reduction="none")
        total = total + each.mean()
    return total


def crops(height: int, width: int, classes: int, samples: int) -> dict[str, Tensor]:
    """Return images with a class for each pixel."""
    images, labels = torch.randn(samples, 3, height, width), torch.randint(classes, (samples, height, width))
    return {"images": images, "labels": labels}


HEADS: dict[str, Callable[..., nn.Module]] = {
    "fcn": FcnHead,
    "fcnd6": SpreadFcnHead,
    "psp": PspHead,
    "deeplabv3": AsppHead,
    "deeplabv3plus": SeparableAsppHead,
    "ann": AnnHead,
    "apc": partial(JoinedHead, kind=AdaptiveContext, parts=(1, 2, 3, 6)),
    "dm": partial(JoinedHead, kind=DynamicFilter, parts=(1, 3, 5, 7)),
    "cc": partial(BetweenHead, kind=CrissCross),
    "nonlocal": partial(BetweenHead, kind=NonLocal),
    "dnl": partial(BetweenHead, kind=partial(NonLocal, disentangled=True)),
    "gc": partial(BetweenHead, kind=GlobalContext),
    "da": DualHead,
    "ema": EmaHead,
    "enc": EncHead,
    "isa": InterlacedHead,
    "psa": PsaHead,
}
OWN_LOGITS = ("da", "enc")
"""Heads that end in logits."""

_NAME = re.compile(r"(\w+)_r(\d+)(b?)_d(\d+)(g?)_(\d+)x(\d+)_(\d+)")


def network(name: str) -> Any:
    """Return a network, with batches of crops, its loss and its optimizer."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    head, depth, plain, stride, grid, *numbers = found.groups()
    height, width, classes = map(int, numbers)
    trunk = Backbone(f"resnet{depth}", not plain, int(stride), (1, 2, 4) if grid else ())
    options = {"dilations": (1, 6, 12, 18)} if grid else {}
    *_, inner, last = trunk.widths
    built = HEADS[head](trunk.widths, classes) if head in OWN_LOGITS else HEADS[head](trunk.widths, **options)
    before = convolved(inner, inner // 4, 3, 6 if head == "fcnd6" else 1)
    aux = nn.Sequential(Stage(2), before, Classes(inner // 4, classes))
    outputs = 0 if head in OWN_LOGITS else 256 if head == "ema" else last // 4
    return Network(trunk, built, outputs, classes, aux), partial(crops, height, width, classes), loss, sgd


def __getattr__(name: str) -> Any:
    if not _NAME.fullmatch(name):
        raise AttributeError(name)
    return partial(network, name)
