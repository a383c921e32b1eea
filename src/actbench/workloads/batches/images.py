"""Batches of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actbench.results.records import Task
from actbench.setup import Batch
from actbench.workloads import base

USUAL_SIZE = 224
OBJECTS = 8  # COCO has 7.3 on an image
MASKED_SHARE = 0.6  # of the patches, as SimMIM hides them (Xie et al. 2021, arXiv 2111.09886)


def part(config: Any) -> Any:
    """Return the part of a config that says how large images are: itself, its vision tower's or its backbone's."""
    parts = (config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config")))
    return next((found for found in parts if getattr(found, "image_size", None)), config)


def size(config: Any, requested: int | None) -> tuple[int, int]:
    """Return height and width: the requested ones, else the config's, else 224 pixels."""
    found = requested or getattr(part(config), "image_size", None) or USUAL_SIZE
    return (found, found) if isinstance(found, int) else (found[0], found[1])


def batch(
    config: Any, task: Task, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> Batch:
    """Make images with the labels of a task.

    Returns:
        ``pixel_values (batch, channels, height, width)`` of ``dtype``, and of a classification ``labels (batch,)``, of
        a segmentation ``(batch, height, width)`` int64, of depths the same of ``dtype``; of a detection a list with
        ``class_labels (8,)`` int64 and ``boxes (8, 4)``, centers and sizes as shares of the image, for each; of masked
        images ``bool_masked_pos (batch, patches)`` in place of labels.
    """
    pictures: dict[str, Any] = {"pixel_values": pixels(config, batch_size, size, dtype, random)}
    match task:
        case "semantic-segmentation":
            pictures["labels"] = torch.randint(max(2, config.num_labels), (batch_size, *size), generator=random)
        case "depth-estimation":
            pictures["labels"] = 1 + torch.rand(batch_size, *size, generator=random).to(dtype)
        case "object-detection":
            pictures["labels"] = [_objects(config.num_labels, dtype, random) for _ in range(batch_size)]
        case "masked-image-modeling":
            pictures["bool_masked_pos"] = (
                torch.rand(batch_size, _patches(config, size), generator=random) < MASKED_SHARE
            )
        case "pretraining":
            pass  # what these hide of an image they draw themselves
        case _:
            pictures["labels"] = base.class_labels(config, batch_size, random)
    return pictures


def pixels(config: Any, batch_size: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Draw images ``(batch_size, channels, height, width)`` of ``dtype`` with the channels of the config."""
    channels = getattr(part(config), "num_channels", None) or 3
    return base.images(batch_size, channels, size, dtype, random)


def _objects(classes: int, dtype: torch.dtype, random: torch.Generator) -> dict[str, Tensor]:
    centers = 0.3 + 0.4 * torch.rand(OBJECTS, 2, generator=random)
    extents = 0.1 + 0.4 * torch.rand(OBJECTS, 2, generator=random)
    return {
        "class_labels": base.classes(OBJECTS, classes, random),
        "boxes": torch.cat([centers, extents], dim=1).to(dtype),
    }


def _patches(config: Any, size: tuple[int, int]) -> int:
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else (patch[0], patch[1])
    return (size[0] // height) * (size[1] // width)
