"""torchvision's models for segmentation and detection, with batches and losses as in its reference scripts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from actbench.errors import ModelError, UntraceableError
from actbench.model.imagesizes import ImageSize
from actbench.model.records import Task
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import Loss, TrainingSetup
from actbench.simulator.fake import shapes_only
from actbench.workload import base
from actbench.workload.base import float_type
from actbench.workload.torchvision import TorchvisionWorkload, models

AUXILIARY_WEIGHT = 0.5  # of references/segmentation/train.py
OBJECTS = 8  # COCO has 7.3 per image
_SEGMENTATION_CLASSES = 21  # of Pascal VOC, as in the published weights
_DETECTION_CLASSES = 91  # of COCO, with the background
_SEGMENTED_SIZE = 480  # the crop of references/segmentation/presets.py
_DETECTED_SIZE = "480x640"  # most images of COCO; the models scale them to 800 px and more, themselves
_Pooling = models.segmentation.deeplabv3.ASPPPooling  # pools a whole image, before a batch norm
_SMALLEST = 32  # of what is left after the last stage, of stride 32, no batch norm can be trained


class SegmentationWorkload(TorchvisionWorkload):
    """A torchvision segmentation model on random images of 21 classes, with cross-entropy for each pixel.

    Models that have an auxiliary classifier are built with it, and its loss counts half.
    """

    def usual_size(self) -> ImageSize:
        """Return the size of crops in torchvision's reference script."""
        return _SEGMENTED_SIZE

    def check_size(self) -> None:
        """Raise a ModelError for images so small that nothing is left after the backbone."""
        if min(self.size) < _SMALLEST:
            raise ModelError(
                f"--image-size {self.case.image_size}: {self.spec} needs images of {_SMALLEST} px at least"
            )

    def options(self) -> dict[str, Any]:
        """Return the arguments of the model's constructor."""
        auxiliary = {} if self.name.startswith("lraspp") else {"aux_loss": True}
        return {"weights_backbone": None, "num_classes": _SEGMENTATION_CLASSES, **auxiliary}

    def published(self) -> Any:
        """Return the published weights of the model."""
        return models.get_model_weights(self.name).DEFAULT

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make ``images (batch_size, 3, height, width)`` of the case's type, ``labels (batch_size, height, width)``."""
        random = base.generator(seed)
        return {
            "images": base.images(batch_size, 3, self.size, float_type(self.case), random),
            "labels": torch.randint(_SEGMENTATION_CLASSES, (batch_size, *self.size), generator=random),
        }

    @staticmethod
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of the pixels, plus half that of the auxiliary classifier.

        Raises:
            ModelError: Batch norm gets one value per channel: one image, pooled to one pixel.
        """
        if len(batch["images"]) == 1 and any(isinstance(each, _Pooling) for each in module.modules()):
            raise ModelError(
                f"one image in a pass: {type(module).__name__} pools each to one pixel, and its batch norm needs more "
                "than one value per channel: take --batch-size 2 or more for each micro-batch"
            )
        output = module(batch["images"])
        # as references/segmentation/train.py of torchvision, where 255 marks the borders of objects
        losses = {name: F.cross_entropy(scores, batch["labels"], ignore_index=255) for name, scores in output.items()}
        return losses["out"] + AUXILIARY_WEIGHT * losses["aux"] if "aux" in losses else losses["out"]


class DetectionWorkload(TorchvisionWorkload):
    """A torchvision detection model on random images with 8 boxes, with the sum of its own losses.

    Which boxes are matched and kept depends on values, which a simulation does not have.
    """

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its losses and optimizer.

        Raises:
            UntraceableError: Only shapes are wanted.
        """
        if not materialize:
            raise UntraceableError(
                f"{self.spec} matches boxes by the values of tensors, which fake tensors do not have; measure it with "
                "--meter cpu or --meter cuda"
            )
        return super().setup(materialize=materialize, seed=seed)

    def usual_size(self) -> ImageSize:
        """Return the size of most images of COCO."""
        return _DETECTED_SIZE

    def check_size(self) -> None:
        """Take images of any size: the models scale them."""

    def options(self) -> dict[str, Any]:
        """Return the arguments of the model's constructor."""
        return {"weights_backbone": None, "num_classes": _DETECTION_CLASSES}

    def published(self) -> Any:
        """Return the published weights of the model."""
        return models.get_model_weights(self.name).DEFAULT

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make images with boxes.

        Returns:
            ``images (batch_size, 3, height, width)`` of the case's type, and ``targets``: for each image
            ``boxes (8, 4)`` of corners in pixels, ``labels (8,)`` int64 and, for Mask R-CNN, ``masks (8, height,
            width)`` uint8.
        """
        random, dtype = base.generator(seed), float_type(self.case)
        images = base.images(batch_size, 3, self.size, dtype, random)
        return {"images": images, "targets": [self._objects(dtype, random) for _ in range(batch_size)]}

    def _objects(self, dtype: torch.dtype, random: torch.Generator) -> dict[str, Tensor]:
        height, width = self.size
        # no box is empty, and none reaches beyond the image
        begin = 0.5 * torch.rand(OBJECTS, 2, generator=random)
        end = begin + 0.1 + 0.4 * torch.rand(OBJECTS, 2, generator=random)
        made = {
            "boxes": (torch.cat([begin, end], dim=1) * torch.tensor([width, height] * 2)).to(dtype),
            "labels": 1 + base.classes(OBJECTS, _DETECTION_CLASSES - 1, random),
        }
        if self.name.startswith("maskrcnn"):
            made["masks"] = torch.randint(2, (OBJECTS, height, width), dtype=torch.uint8, generator=random)
        return made

    @property
    def loss(self) -> Loss:  # type: ignore[override]  # it needs the name for its message
        """Return the sum of the losses that the model computes."""
        described = f"{self.spec} for object-detection"

        def loss(module: nn.Module, batch: Batch) -> Tensor:
            with ExitStack() as stack:
                if isinstance(batch["images"], FakeTensor):
                    stack.enter_context(shapes_only(described, "measure it with --meter cpu or --meter cuda"))
                found: dict[str, Tensor] = module(list(batch["images"]), batch["targets"])
                return torch.stack(list(found.values())).sum()

        return loss


BY_TASK: dict[Task, type[TorchvisionWorkload]] = {
    "image-classification": TorchvisionWorkload,
    "semantic-segmentation": SegmentationWorkload,
    "object-detection": DetectionWorkload,
}
