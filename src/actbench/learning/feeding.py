"""A data set as batches for one model: named as the model wants them, pictures at its size and channels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench.errors import UsageError
from actbench.learning import data
from actbench.learning.data import DataSet, Kind
from actbench.runs.records import TrainingCase
from actbench.training import Batch
from actbench.workloads.base import Workload

_MODELS: dict[Kind, str] = {
    "pictures": "an image-classification model",
    "language": "a causal-lm model (see task)",
    "sentences": "a sequence-classification model (see task)",
}


@dataclass(frozen=True)
class Feed:
    """Batches of a data set for a model; which samples a step sees depends on seed and step alone.

    Attributes:
        data: The samples.
        inputs: What the model calls its inputs.
        shape: Shape of one input.
        dtype: Type of pictures.
        batch_size: Samples of a training step.
        seed: Of the order of the samples and of what changes them.
    """

    data: DataSet
    inputs: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of the training set; the samples that are left over are others in each epoch."""
        return len(self.data.train) // self.batch_size

    def chosen(self, step: int) -> Tensor:
        """Return which samples of the training set the batch of a step holds, int64 (batch_size,)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.data.train), generator=_generator("order", self.seed, epoch))
        return order[place * self.batch_size :][: self.batch_size]

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step, from 0."""
        chosen = self.chosen(step)
        inputs = self.data.train.inputs[chosen]
        if self.data.augment is not None:
            inputs = self.data.augment(inputs, _generator("augment", self.seed, step))
        return self._named(inputs, self.data.train.labels[chosen])

    def validation(self) -> Iterator[Batch]:
        """Yield the validation set in order, the last batch as small as it is."""
        held_back = self.data.validation
        for start in range(0, len(held_back), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self._named(held_back.inputs[part], held_back.labels[part])

    def _named(self, inputs: Tensor, labels: Tensor) -> Batch:
        if self.data.kind == "pictures":
            inputs = self._fitted(inputs).to(self.dtype)
        return {self.inputs: inputs, "labels": labels}

    def _fitted(self, images: Tensor) -> Tensor:
        channels, *size = self.shape
        if list(images.shape[2:]) != size:
            images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
        return images.expand(-1, channels, -1, -1).contiguous()


def _generator(purpose: str, seed: int, place: int) -> torch.Generator:
    """Return a generator of its own for a place of a run.

    Its seed is a hash, because torch's CPU generator looks at the low 32 bits of a seed only.
    """
    digest = hashlib.sha256(f"{purpose} {seed} {place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4]))


def feed(case: TrainingCase, workload: Workload) -> Feed:
    """Load a run's data set for its model.

    Raises:
        UsageError: The data set is unknown or missing, or it and the model do not go together.
    """
    example = workload.batch(1, seed=0)
    inputs = next((name for name in ("images", "pixel_values", "input_ids") if name in example), None)
    if inputs is None or "labels" not in example:
        raise UsageError(f"{case.model} cannot be trained on data sets: its batches hold {', '.join(example)}")
    shape = tuple(example[inputs].shape[1:])
    _check_kind(case, data.kind_of(case.data), inputs, example)
    found = data.load(case.data, shape[0] if inputs == "input_ids" else 0)
    _check_shape(case, found, shape)
    if len(found.train) < case.batch_size:
        raise UsageError(f"batch_size {case.batch_size}: {case.data} has {len(found.train)} training samples")
    return Feed(found, inputs, shape, getattr(torch, case.dtype), case.batch_size, case.seed)


def check_scores(feed: Feed, spec: str, module: nn.Module, scores: Tensor) -> None:
    """Check that a model tells as many classes apart as the data has.

    Raises:
        UsageError: It has too few.
    """
    found, needed = scores.shape[-1], feed.data.classes
    if found < needed:
        key = "num_labels" if hasattr(module, "config") else "num_classes"
        raise UsageError(
            f"{spec} tells {found} classes apart and {feed.data.name} has {needed}: write {spec}"
            f"{',' if '@' in spec else '@'}{key}={needed}"
        )


def check_vocabulary(feed: Feed, spec: str, module: nn.Module) -> None:
    """Check that a model knows every token of the data.

    Raises:
        UsageError: It does not.
    """
    embeddings = getattr(module, "get_input_embeddings", None)
    if feed.data.vocabulary is None or embeddings is None:
        return
    known = embeddings().num_embeddings
    if known < feed.data.vocabulary:
        raise UsageError(
            f"{spec} knows {known} tokens and {feed.data.name} has {feed.data.vocabulary}: write "
            f"vocab_size={feed.data.vocabulary} after the @"
        )


def _check_kind(case: TrainingCase, wanted: Kind, inputs: str, example: Batch) -> None:
    labels: Tensor = example["labels"]
    kind = "pictures" if inputs != "input_ids" else "language" if labels.dim() > 1 else "sentences"
    if "decoder_input_ids" in example or labels.is_floating_point():
        kind = "other"
    if kind == "language" and case.task == "masked-lm":
        kind = "other"
    if kind != wanted:
        raise UsageError(f"the data set {case.data} is for {_MODELS[wanted]}; {case.model} is none")


def _check_shape(case: TrainingCase, found: DataSet, shape: tuple[int, ...]) -> None:
    if found.kind != "pictures":
        return
    channels = found.train.inputs.shape[1]
    if channels not in (1, shape[0]):
        raise UsageError(f"{case.data} has pictures of {channels} channels; {case.model} takes {shape[0]}")


def total_steps(case: TrainingCase, feed: Feed) -> int:
    """Return how many steps a run has."""
    return case.steps or (case.epochs or 1) * feed.steps_per_epoch


def evaluation_interval(case: TrainingCase, feed: Feed, steps: int) -> int:
    """Return how many steps lie between evaluations: an epoch unless given, and more where that made over 20."""
    return case.evaluate_every or max(feed.steps_per_epoch, math.ceil(steps / 20))
