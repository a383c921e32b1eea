"""Networks for small pictures, without torchvision's first layers, which shrink a picture four times or more.

``resnet-cifar@depth=8,width=16``   three stages, depth 6n + 2 (He et al. 2015, arXiv 1512.03385, section 4.2)
``resnet18-cifar``, ``resnet34-cifar``   the four stages of ResNet-18 and -34
``inception-cifar``                    torchvision's Inception v3 behind another stem

All begin with 3 x 3 convolutions of stride 1 and no pooling. Keys after the @: ``channels`` of the pictures and
``num_classes``; for residual networks also ``width`` of the first stage; for ``resnet-cifar`` also ``depth``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import ModelError
from actbench.model.imagesizes import edges
from actbench.model.records import Built, Case
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup
from actbench.workload import base
from actbench.workload.base import construct, float_type
from actbench.workload.names import SMALL_NETS

USUAL_SIZE = 32
_STAGES: dict[str, tuple[int, ...]] = {"resnet18-cifar": (2, 2, 2, 2), "resnet34-cifar": (3, 4, 6, 3)}
_DEFAULTS = {
    "resnet-cifar": {"depth": 20, "width": 16, "channels": 3, "num_classes": 10},
    "resnet18-cifar": {"width": 64, "channels": 3, "num_classes": 10},
    "resnet34-cifar": {"width": 64, "channels": 3, "num_classes": 10},
    "inception-cifar": {"channels": 3, "num_classes": 10},
}
_SMALLEST = {"inception-cifar": 7}  # px: in smaller pictures, nothing is left for the later blocks
assert tuple(_DEFAULTS) == SMALL_NETS


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm beside a shortcut; a 1 x 1 convolution if the shape changes.

    The input is ``(batch, channels, height, width)``; the output has ``width`` channels. A stride of 2 halves the
    picture.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        # without biases, which the norms behind them would take away again
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, width, height / stride, width / stride)``."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.shortcut(x))  # type: ignore[no-any-return]


class SmallResNet(nn.Module):
    """A residual network with a stem for small pictures ``(batch, channels, height, width)``.

    Each stage after the first halves the picture and doubles the width.
    """

    def __init__(self, stages: Sequence[int], width: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        blocks: list[nn.Module] = []
        size = width
        for stage, count in enumerate(stages):
            for place in range(count):
                wanted = width * 2**stage
                blocks.append(ResidualBlock(size, wanted, 2 if stage and not place else 1))
                size = wanted
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(size, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores ``(batch, num_classes)``."""
        x = self.relu(self.bn(self.conv(images)))
        return self.classifier(self.pool(self.blocks(x)).flatten(1))  # type: ignore[no-any-return]


class SmallNetWorkload(base.Workload):
    """A network for small pictures on random pictures, by default of 32 px, with cross-entropy.

    Raises:
        ModelError: A key or value is wrong, pictures are too small, or the case asks for another task or published
            weights.
    """

    def __init__(self, name: str, changes: Mapping[str, Any], case: Case) -> None:
        if case.task not in ("auto", "image-classification"):
            raise ModelError(f"--task {case.task}: {case.model} does image-classification")
        if case.weights == "pretrained":
            raise ModelError(f"no pretrained weights for {case.model}: none are published; use --weights random")
        self.case = case
        self.spec = case.model
        self._options = _checked({**_DEFAULTS[name], **changes}, _DEFAULTS[name], case.model)
        self._stages = _stages(name, self._options, case.model)
        self._size = edges(case.image_size or USUAL_SIZE)
        if min(self._size) < _SMALLEST.get(name, 1):
            raise ModelError(
                f"--image-size {case.image_size}: {case.model} needs images of {_SMALLEST[name]} px at least"
            )

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the network in training mode with its loss and optimizer."""
        module = construct(self._make, materialize=materialize, seed=seed)
        built = Built(model_class=type(module).__name__, task="image-classification", image_size=self._size)
        return base.setup_of(self.case, module.to(float_type(self.case)), _loss, built=built)

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make ``images (batch_size, channels, height, width)`` of the case's type, ``labels (batch_size,)`` int64."""
        random, dtype = base.generator(seed), float_type(self.case)
        return {
            "images": base.images(batch_size, self._options["channels"], self._size, dtype, random),
            "labels": base.classes(batch_size, self._options["num_classes"], random),
        }

    def _make(self) -> nn.Module:
        options = {name: value for name, value in self._options.items() if name != "depth"}
        if self._stages is not None:
            return SmallResNet(self._stages, **options)
        from actbench.workload.torchvision import small_inception

        return small_inception(**options)


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["images"]), batch["labels"])


def _checked(options: dict[str, Any], keys: Mapping[str, int], spec: str) -> dict[str, int]:
    for key, value in options.items():
        if key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ModelError(f"model {spec!r} has no key {key!r}; {hint}its keys: {', '.join(keys)}")
        if type(value) is not int or value < 1:
            raise ModelError(f"model {spec!r}: {key}={value} must be a whole number from 1")
    return options


def _stages(name: str, options: Mapping[str, int], spec: str) -> tuple[int, ...] | None:
    """Return the number of blocks in each stage of a residual network; None for another network."""
    if name == "inception-cifar":
        return None
    if name in _STAGES:
        return _STAGES[name]
    blocks, rest = divmod(options["depth"] - 2, 6)
    if rest or blocks < 1:
        raise ModelError(f"model {spec!r}: depth={options['depth']} must be 8, 14, 20 or another 6n + 2")
    return blocks, blocks, blocks
