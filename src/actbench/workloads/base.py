"""A model with its batches and its loss, and random inputs, made without a look at a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from actbench.setup import Batch, TrainingSetup


class Workload(Protocol):
    """A model, how to make a batch of n for it, and its scalar loss.

    Attributes:
        spec: The model specification that was asked for.
        weights_origin: Where the weights come from: ``random``, ``pretrained:NAME``, ``folder:PATH``, ``function``,
            or ``not loaded (shapes only)``; known after :meth:`setup`.
        warnings: What a user must know of how the model was found; known after :meth:`setup`.
    """

    spec: str
    weights_origin: str
    warnings: tuple[str, ...]

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Build the model in training mode with its loss and optimizer.

        Args:
            materialize: False when only shapes are wanted: parameters may then be on the meta device.
            seed: Seeds the random initialisation.

        Raises:
            ModelError: The model cannot be found, read or built.
        """
        ...

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Make a batch on the CPU, or of fake tensors when a fake tensor mode is active."""
        ...


IGNORED_LABEL = -100  # what cross_entropy leaves out by default
MASKED_SHARE = 0.15  # share of tokens that BERT's masked language modelling predicts


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator of its own, so that batches neither read nor move torch's global one."""
    return torch.Generator().manual_seed(seed)


def tokens(batch_size: int, length: int, vocabulary: int, excluded: Iterable[int], random: torch.Generator) -> Tensor:
    """Draw token ids uniformly from a vocabulary without the excluded ids (padding, end of sequence).

    Returns:
        Ids ``(batch_size, length)`` int64.
    """
    left_out = sorted({index for index in excluded if 0 <= index < vocabulary})
    ids = torch.randint(vocabulary - len(left_out), (batch_size, length), generator=random)
    for index in left_out:  # ascending, so each step makes room for one more id
        ids = ids + (ids >= index)
    return ids


def masked_labels(ids: Tensor, random: torch.Generator) -> Tensor:
    """Return labels ``(batch, length)`` int64 that keep 15 % of the ids, the first of each row always."""
    kept = torch.rand(ids.shape, generator=random) < MASKED_SHARE
    kept[:, 0] = True
    return torch.where(kept, ids, IGNORED_LABEL)


def classes(batch_size: int, count: int, random: torch.Generator) -> Tensor:
    """Draw labels ``(batch_size,)`` int64 from ``count`` classes."""
    return torch.randint(count, (batch_size,), generator=random)


def class_labels(config: Any, batch_size: int, random: torch.Generator) -> Tensor:
    """Draw class ids, or floats where the config says regression (one label) or several labels at once."""
    if config.problem_type == "multi_label_classification":
        return torch.rand(batch_size, config.num_labels, generator=random).round()
    if config.num_labels == 1 or config.problem_type == "regression":
        return torch.rand(batch_size, generator=random)
    return classes(batch_size, config.num_labels, random)


def images(
    batch_size: int, channels: int, size: tuple[int, int], dtype: torch.dtype, random: torch.Generator
) -> Tensor:
    """Draw images ``(batch_size, channels, height, width)`` from a standard normal, as normalised pictures are."""
    return torch.randn(batch_size, channels, *size, generator=random).to(dtype)
