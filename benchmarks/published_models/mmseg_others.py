"""Networks of mmsegmentation on other backbones than dilated ResNets, by name.

``fcn_hr18_512x1024_19`` is an FCN on HRNet-W18 for crops of 512 x 1024 pixels with 19 classes. Before 1.10, torch's
ReLU out of place saved its input, as ``threshold`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mmseg import (
    AsppHead,
    Attention,
    Backbone,
    Classes,
    EncHead,
    Network,
    SeparableAsppHead,
    Stage,
    convolved,
    crops,
    loss,
    sgd,
)
from segmentation import FcnHead, PspHead, UNet, UperHead, enlarged, layer
from torch import Tensor, nn
from torch.nn import functional as F


def normed(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """Return a convolution and its norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """A residual block of two convolutions, or of three if it has four times as many outputs."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        narrow = (layer(inputs, width), normed(width, width, 3))
        wide = (layer(inputs, width, 1), layer(width, width), normed(width, outputs))
        self.body = nn.Sequential(*(narrow if width == outputs else wide))
        self.beside = nn.Identity() if inputs == outputs else normed(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        found = self.body(x)
        found += self.beside(x)
        return F.relu(found, inplace=True)


class Fused(nn.Module):
    """Branches of several sizes, whose ends are added to each other."""

    def __init__(self, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(Block(width, width, width) for _ in range(blocks))) for width in widths
        )
        self.ways = nn.ModuleList(
            nn.ModuleList(self._way(widths, start, end) for start in range(len(widths))) for end in range(len(widths))
        )

    @staticmethod
    def _way(widths: Sequence[int], start: int, end: int) -> nn.Module:
        if end <= start:
            return nn.Identity() if end == start else normed(widths[start], widths[end])
        between = [
            part
            for _ in range(end - start - 1)
            for part in (normed(widths[start], widths[start], 3, 2), nn.Threshold(0, 0))
        ]
        return nn.Sequential(*between, normed(widths[start], widths[end], 3, 2))

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        """Return each size with what comes to it from all."""
        branches = [branch(x) for branch, x in zip(self.branches, branches, strict=True)]
        fused = []
        for end, ways in enumerate(self.ways):
            total = torch.zeros((), device=branches[0].device)
            for start, (way, x) in enumerate(zip(ways, branches, strict=True)):
                if start > end:
                    total = total + enlarged(way(x), branches[end])
                elif start:
                    total += way(x)
                else:
                    total = total + way(x)
            fused.append(F.threshold(total, 0, 0))
        return fused


class HRNet(nn.Module):
    """Branches of one to four sizes side by side.

    Attributes:
        widths: Channels of the branches.
    """

    def __init__(self, width: int, small: bool) -> None:
        super().__init__()
        self.widths = [width * 2**place for place in range(4)]
        blocks = 2 if small else 4
        modules = (1, 3, 2) if small else (1, 4, 3)
        self.stem = nn.Sequential(layer(3, 64, stride=2), layer(64, 64, stride=2))
        self.first = nn.Sequential(*(Block(256 if place else 64, 64, 256) for place in range(blocks)))
        self.begun = nn.ModuleList(
            nn.ModuleList(self._begun(stage, place) for place in range(stage + 1)) for stage in (1, 2, 3)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(Fused(self.widths[: stage + 2], blocks) for _ in range(count)))
            for stage, count in enumerate(modules)
        )

    def _begun(self, stage: int, place: int) -> nn.Module:
        if stage == 1:
            return layer(256, self.widths[place], stride=place + 1)
        return layer(self.widths[place - 1], self.widths[place], stride=2) if place == stage else nn.Identity()

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the branches."""
        branches = [self.first(self.stem(x))]
        for begun, stage in zip(self.begun, self.stages, strict=True):
            branches = [
                way(branches[place] if place < len(branches) else branches[-1]) for place, way in enumerate(begun)
            ]
            branches = stage(branches)
        return branches


class JoinedBranches(nn.Module):
    """All branches in the size of the first, beside each other."""

    def forward(self, branches: list[Tensor]) -> Tensor:
        """Return the channels of all branches."""
        return torch.cat([F.interpolate(x, size=branches[0].shape[2:], mode="bilinear") for x in branches], 1)


class BranchesHead(nn.Module):
    """All branches beside each other, and a convolution of single pixels."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.joined = nn.Sequential(JoinedBranches(), layer(sum(widths), sum(widths), 1))

    def forward(self, branches: list[Tensor]) -> Tensor:
        """Return as many channels as all branches have."""
        return self.joined(branches)


class OcrHead(nn.Module):
    """Pixels that attend to the classes of a first network, which runs once for its own loss and once for them."""

    def __init__(self, first: nn.Module, chosen: nn.Module, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.first, self.chosen, self.bottleneck = first, chosen, layer(inputs, 512)
        query, key = (nn.Sequential(layer(512, 256, 1), layer(256, 256, 1)) for _ in range(2))
        self.attention = Attention(query, key, layer(512, 256, 1), layer(256, 512, 1))
        self.joined, self.classes = layer(1024, 512, 1), Classes(512, classes, dropout)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the logits of both networks."""
        logits, first = self.first(stages), self.first(stages)
        x = self.bottleneck(self.chosen(stages))
        weights = F.softmax(first.flatten(2), 2)
        context = torch.matmul(weights, x.flatten(2).transpose(1, 2)).transpose(1, 2).contiguous().unsqueeze(3)
        return [logits, self.classes(self.joined(torch.cat([self.attention(x, context), x], 1)))]


class Inverted(nn.Module):
    """A block of MobileNetV2: more channels, each convolved by itself, and fewer again."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int, ratio: int) -> None:
        super().__init__()
        inner = inputs * ratio
        own = nn.Conv2d(inner, inner, 3, stride, dilation, dilation, inner, bias=False)
        wider = [nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(
            *(wider if ratio > 1 else []),
            own,
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            *normed(inner, outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result, added to its input if both have the same size."""
        found: Tensor = x + self.body(x) if self.adds else self.body(x)
        return found


class MobileNetV2(nn.Module):
    """MobileNetV2 whose last stages have an eighth of the image's size.

    Its activations are ReLU6 in place, which saved their result, as ReLU does; newer torch saves a copy of their input.

    Attributes:
        widths: Channels of its stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widths = [24, 32, 96, 320]
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        settings = zip(
            (16, 24, 32, 64, 96, 160, 320),
            (1, 2, 3, 4, 3, 3, 1),
            (1, 2, 2, 1, 1, 1, 1),
            (1, 1, 1, 2, 2, 4, 4),
            strict=True,
        )
        self.layers, inputs = nn.ModuleList(), 32
        for outputs, blocks, stride, dilation in settings:
            ratio = 1 if outputs == 16 else 6
            parts = []
            for place in range(blocks):
                parts.append(Inverted(inputs, outputs, 1 if place else stride, 1 if place else dilation, ratio))
                inputs = outputs
            self.layers.append(nn.Sequential(*parts))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the second, third, fifth and last stage."""
        x = self.stem(x)
        stages = [x := each(x) for each in self.layers]
        return [stages[place] for place in (1, 2, 4, 6)]


class Split(nn.Module):
    """A convolution to two groups of channels, weighed against each other by the means of the image."""

    def __init__(self, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        inner = max(width // 2, 32)
        convolution = nn.Conv2d(width, 2 * width, 3, stride, dilation, dilation, 2, bias=False)
        self.parts = nn.Sequential(convolution, nn.BatchNorm2d(2 * width), nn.ReLU(inplace=True))
        self.weights = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), nn.ReLU(inplace=True), nn.Conv2d(inner, 2 * width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighed sum."""
        x = self.parts(x)
        parts = x.view(len(x), 2, -1, *x.shape[2:])
        weights = self.weights(F.adaptive_avg_pool2d(parts.sum(1), 1))
        weights = F.softmax(weights.view(len(x), 1, 2, -1).transpose(1, 2), 1).reshape(len(x), -1)
        return (weights.view(len(x), 2, -1, 1, 1) * parts).sum(1).contiguous()


class ResNeStBlock(nn.Module):
    """A residual block of three convolutions, the second of them split."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        pool = nn.AvgPool2d(3, stride, 1) if stride > 1 else nn.Identity()
        self.body = nn.Sequential(layer(inputs, width, 1), Split(width, 1, dilation), pool, *normed(width, outputs))
        down = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
        beside = nn.Sequential(down, *normed(inputs, outputs))
        self.beside = nn.Identity() if inputs == outputs else beside

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways."""
        found = self.body(x)
        found += self.beside(x)
        return F.relu(found, inplace=True)


class ResNeSt(nn.Module):
    """ResNeSt-101 whose last stage has an eighth of the image's size.

    Attributes:
        widths: Channels of its stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widths = [256, 512, 1024, 2048]
        self.stem = nn.Sequential(layer(3, 64, stride=2), layer(64, 64), layer(64, 128), nn.MaxPool2d(3, 2, 1))
        self.stages, inputs = nn.ModuleList(), 128
        for blocks, width, stride, dilation in ((3, 64, 1, 1), (4, 128, 2, 1), (23, 256, 1, 2), (3, 512, 1, 4)):
            parts = []
            for place in range(blocks):
                spread = dilation if place else max(dilation // 2, 1)
                parts.append(ResNeStBlock(inputs, width, 1 if place else stride, spread))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*parts))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return what each stage gives."""
        x = self.stem(x)
        return [x := stage(x) for stage in self.stages]


class FpnNeck(nn.Module):
    """A pyramid of 256 channels, without norms."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths)
        self.levels = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in widths)

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the levels."""
        found = [side(x) for side, x in zip(self.sides, stages, strict=True)]
        for level in (2, 1, 0):
            found[level] += F.interpolate(found[level + 1], size=found[level].shape[2:], mode="nearest")
        return [level(x) for level, x in zip(self.levels, found, strict=True)]


class FpnHead(nn.Module):
    """Each level convolved and doubled to the size of the first, and the sum of all."""

    def __init__(self) -> None:
        super().__init__()
        doubled = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.ways = nn.ModuleList(
            nn.Sequential(
                *(
                    part
                    for place in range(max(level, 1))
                    for part in (layer(128 if place else 256, 128), *([doubled] if level else []))
                )
            )
            for level in range(4)
        )

    def forward(self, levels: list[Tensor]) -> Tensor:
        """Return 128 channels."""
        found = self.ways[0](levels[0])
        for way, x in zip(self.ways[1:], levels[1:], strict=True):
            found = found + enlarged(way(x), found)
        return found


class PyramidHead(nn.Module):
    """A pyramid with its head, and a finer look at 2,048 points of each image, for which the head runs again."""

    def __init__(self, widths: Sequence[int], classes: int, points: bool) -> None:
        super().__init__()
        self.neck, self.head = FpnNeck(widths), FpnHead()
        self.classes = Classes(128, classes, 0 if points else 0.1)
        inputs = 256 + classes
        self.points = nn.ModuleList(nn.Conv1d(inputs, 256, 1) for _ in range(3)) if points else None
        self.point_classes = nn.Conv1d(inputs, classes, 1) if points else None

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the logits of pixels, and those of points."""
        levels = self.neck(stages)
        logits = self.classes(self.head(levels))
        if self.points is None or self.point_classes is None:
            return [logits]
        rough = self.classes(self.head(levels))
        places = torch.rand(len(logits), 2048, 1, 2, device=logits.device) * 2 - 1
        with torch.no_grad():
            tried = torch.rand(len(logits), 3 * 2048, 1, 2, device=logits.device) * 2 - 1
            F.grid_sample(rough, tried, align_corners=False)
        fine, coarse = (F.grid_sample(x, places, align_corners=False).squeeze(3) for x in (levels[0], rough))
        x = torch.cat([fine, coarse], 1)
        for point in self.points:
            x = torch.cat([F.threshold(point(x), 0, 0), coarse], 1)
        return [logits, self.point_classes(x)]


class Encoder(nn.Module):
    """UNet-S5-D16 without its heads.

    Attributes:
        widths: Channels of what it gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widths = [512, 256, 128, 64]
        self.unet = UNet()
        del self.unet.head, self.unet.aux

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return what each stage up gives."""
        before = []
        for down in self.unet.down:
            x = down(x)
            before.append(x)
        after = []
        for up, joined, beside in zip(self.unet.up, self.unet.joined, before[-2::-1], strict=True):
            x = up(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))
            x = joined(torch.cat([beside, x], 1))
            after.append(x)
        return after


class Jpu(nn.Module):
    """The last three stages, convolved, in the size of the first of them, and four dilated convolutions of all."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(layer(width, 512) for width in widths[1:])
        self.spread = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(1536, 1536, 3, 1, step, step, 1536, bias=False),
                nn.BatchNorm2d(1536),
                *convolved(1536, 512, 1),
            )
            for step in (1, 2, 4, 8)
        )

    def forward(self, stages: list[Tensor]) -> list[Tensor]:
        """Return the stages, the last of them replaced."""
        found = [conv(x) for conv, x in zip(self.convs, stages[1:], strict=True)]
        joined = torch.cat([found[0], *[enlarged(x, found[0]) for x in found[1:]]], 1)
        return [stages[0], *stages[1:3], torch.cat([spread(joined) for spread in self.spread], 1)]


class JpuTrunk(nn.Module):
    """A ResNet-50 without dilation, and the joint upsampling of its stages.

    Attributes:
        widths: Channels of what it gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Backbone("resnet50", True, 32)
        self.widths = self.trunk.widths
        self.jpu = Jpu(self.widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the stages, the last of them replaced."""
        return self.jpu(self.trunk(x))


class ViTBlock(nn.Module):
    """A transformer's block whose attention makes the whole matrix of scores, and its mean over heads."""

    def __init__(self, width: int, heads: int, dropout: float, path: float) -> None:
        super().__init__()
        self.heads, self.path = heads, path
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        wide = (nn.Linear(width, 4 * width), nn.GELU(), self.dropout, nn.Linear(4 * width, width), self.dropout)
        self.mlp = nn.Sequential(*wide)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.path:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device).add_(1 - self.path).floor_()
        return x.div(1 - self.path) * kept

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        normal = self.norms[0](x).transpose(0, 1)
        tokens, images, width = normal.shape
        query, key, value = self.into(normal).chunk(3, -1)
        query = query * (width // self.heads) ** -0.5
        query, key, value = (
            each.contiguous().view(tokens, images * self.heads, -1).transpose(0, 1) for each in (query, key, value)
        )
        weights = F.softmax(torch.bmm(query, key.transpose(1, 2)), -1)
        found = torch.bmm(weights, value).transpose(0, 1).contiguous().view(tokens, images, width)
        weights.view(images, self.heads, tokens, tokens).sum(1).div(self.heads)
        x = x + self._dropped(self.dropout(self.out(found).transpose(0, 1)))
        return x + self._dropped(self.mlp(self.norms[1](x)))


class ViT(nn.Module):
    """A vision transformer for 512 pixels with patches of 16.

    Attributes:
        widths: Channels of what it gives.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        given: Sequence[int],
        dropout: float = 0,
        path: float = 0,
        image: int = 512,
    ) -> None:
        super().__init__()
        self.widths, self.given = [width] * 4, given
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (image // 16) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            ViTBlock(width, heads, dropout, path * place / (layers - 1)) for place in range(layers)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return images of tokens, of four layers."""
        x = self.patches(x)
        height, width = x.shape[2:]
        x = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
        places = self.places
        if places.shape[1] != x.shape[1]:
            side = int((places.shape[1] - 1) ** 0.5)
            image = places[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
            image = F.interpolate(image, size=(height, width), mode="bilinear", align_corners=False)
            places = torch.cat([places[:, :1], image.flatten(2).transpose(1, 2)], 1)
        x = self.dropout(x + places)
        found = []
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place in self.given:
                found.append(x[:, 1:].reshape(len(x), height, width, -1).permute(0, 3, 1, 2))
        return found


class Levels(nn.Module):
    """Four images of one size made four sizes, with convolutions without norms."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Conv2d(width, width, 1) for width in widths)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for width in widths)

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """Return the four sizes."""
        images = [side(x) for side, x in zip(self.sides, images, strict=True)]
        scaled = [
            F.interpolate(x, scale_factor=scale, mode="bilinear")
            for x, scale in zip(images, (4.0, 2.0, 1.0, 0.5), strict=True)
        ]
        return [conv(x) for conv, x in zip(self.convs, scaled, strict=True)]


def vit_trunk(width: int, heads: int, path: float, levels: bool) -> tuple[nn.Module, list[int]]:
    """Return a transformer of twelve layers, with its channels."""
    trunk = ViT(width, 12, heads, (2, 5, 8, 11), path=path)
    return nn.Sequential(trunk, Levels(trunk.widths)) if levels else trunk, trunk.widths


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(module.parameters(), lr=6e-5, weight_decay=0.01)


HEADS: dict[str, Callable[..., nn.Module]] = {
    "fcn": FcnHead,
    "psp": PspHead,
    "aspp": AsppHead,
    "deeplabv3": AsppHead,
    "deeplabv3plus": SeparableAsppHead,
    "uper": UperHead,
}
_NAME = re.compile(r"(\w+?)_(\w+?)_(\d+)x(\d+)_(\d+)")
_HRNETS = {"hr18s": (18, True), "hr18": (18, False), "hr48": (48, False)}
_VITS = {
    "vitb": (768, 12, 0.0, True),
    "deits": (384, 6, 0.1, False),
    "deitsmln": (384, 6, 0.1, True),
    "deitb": (768, 12, 0.1, False),
    "deitbmln": (768, 12, 0.1, True),
}


def network(name: str) -> Any:
    """Return a network, with batches of crops, its loss and its optimizer."""
    found = _NAME.fullmatch(name)
    if not found:
        raise AttributeError(name)
    head, trunk, *numbers = found.groups()
    height, width, classes = map(int, numbers)
    optimizer = adamw if trunk in _VITS else sgd
    return _network(head, trunk, classes), partial(crops, height, width, classes), loss, optimizer


def _network(head: str, trunk: str, classes: int) -> nn.Module:
    if trunk in _HRNETS:
        backbone = HRNet(*_HRNETS[trunk])
        width = sum(backbone.widths)
        if head == "fcn":
            return Network(backbone, BranchesHead(backbone.widths), width, classes, None, 0)
        first = nn.Sequential(BranchesHead(backbone.widths), Classes(width, classes, 0))
        return Network(backbone, OcrHead(first, JoinedBranches(), width, classes, 0), 0, classes, None)
    if trunk in _VITS:
        built, widths = vit_trunk(*_VITS[trunk])
        aux = _aux(widths[0], 256, classes, 3)
        return Network(built, UperHead(widths, width=512), 512, classes, aux)
    if trunk in ("r18", "r50", "r101"):
        resnet = Backbone(f"resnet{trunk[1:]}", True, 32)
        if head == "uper":
            aux = _aux(resnet.widths[2], 256, classes)
            return Network(resnet, UperHead(resnet.widths, width=512), 512, classes, aux)
        return Network(resnet, PyramidHead(resnet.widths, classes, head == "pointrend"), 0, classes, None)
    if trunk == "r101d8":  # ocr
        resnet = Backbone("resnet101", True, 8)
        first = nn.Sequential(Stage(2), _aux_layers(1024, 256, classes))
        return Network(resnet, OcrHead(first, Stage(3), 2048, classes, 0.1), 0, classes, None)
    if trunk == "unet":
        encoder = Encoder()
        built = layer(64, 64) if head == "fcn" else HEADS[head](encoder.widths, width=16)
        built = nn.Sequential(Stage(3), built) if head == "fcn" else built
        return Network(encoder, built, 64 if head == "fcn" else 16, classes, _aux(128, 64, classes))
    if trunk == "jpu":
        jpu = JpuTrunk()
        built = EncHead(jpu.widths, classes) if head == "enc" else HEADS[head](jpu.widths)
        return Network(jpu, built, 0 if head == "enc" else 512, classes, _aux(1024, 256, classes))
    backbone = MobileNetV2() if trunk == "mv2" else ResNeSt()
    return Network(
        backbone, HEADS[head](backbone.widths, width=512), 512, classes, _aux(backbone.widths[2], 256, classes)
    )


def _aux_layers(inputs: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(layer(inputs, width), Classes(width, classes))


def _aux(inputs: int, width: int, classes: int, stage: int = 2) -> nn.Module:
    return nn.Sequential(Stage(stage), _aux_layers(inputs, width, classes))


def __getattr__(name: str) -> Any:
    if not _NAME.fullmatch(name):
        raise AttributeError(name)
    return partial(network, name)
