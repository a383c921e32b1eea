"""A data set as batches for one model: named as the model wants them, pictures at its size and channels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from actbench.errors import UsageError
from actbench.model.records import Task
from actbench.scheme.microbatches import Batch
from actbench.tools.train import data
from actbench.tools.train.data import DataSet, Kind, Samples
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import TrainingCase
from actbench.workload.base import Workload

_MODELS: dict[Kind, str] = {
    "pictures": "an image-classification model",
    "language": "a causal-lm model (see task)",
    "sentences": "a sequence-classification model (see task)",
    "ratings": "a sequence-classification model with num_labels=1",
}
_TASKS: tuple[Task, ...] = ("image-classification", "causal-lm", "sequence-classification")


@dataclass(frozen=True)
class Feed:
    """Batches of a data set for a model; which samples a step sees depends on seed and step alone.

    Each of ``ranks`` processes has its share of a batch of ``batch_size``. ``inputs`` is what the model calls its
    inputs, ``shape`` that of one input, and ``dtype`` the type of pictures.
    """

    data: DataSet
    inputs: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int
    seed: int
    rank: int = 0
    ranks: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of the training set; the samples left over are others in each epoch."""
        return len(self.data.train) // self.batch_size

    def chosen(self, step: int) -> Tensor:
        """Return the samples of this process's share of a step's batch, int64 (rows,)."""
        return self._mine(self._of_all(step))

    def batch(self, step: int) -> Batch:
        """Return this process's share of the batch of a training step, from 0."""
        chosen, augment = self._of_all(step), self.data.augment
        train, mine = self.data.train, self._mine(chosen)
        if augment is None:
            return self._named(train, mine, train.inputs[mine])
        changed = augment(train.inputs[chosen], _generator("augment", self.seed, step))
        return self._named(train, mine, self._mine(changed))

    def validation(self) -> Iterator[tuple[Batch, int]]:
        """Yield this process's share of the validation set in order, and how many rows of each batch count.

        All processes get equally many batches, because under FSDP2 a forward pass needs all processes: a process
        without rows left gets a batch that does not count.
        """
        held_back = self.data.validation
        for start in range(0, len(held_back), self.batch_size):
            rows = torch.arange(start, min(start + self.batch_size, len(held_back)))
            mine = rows.tensor_split(self.ranks)[self.rank]
            shown = mine if len(mine) else rows[:1]
            yield self._named(held_back, shown, held_back.inputs[shown]), len(mine)

    def _of_all(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.data.train), generator=_generator("order", self.seed, epoch))
        return order[place * self.batch_size :][: self.batch_size]

    def _mine(self, rows: Tensor) -> Tensor:
        share = self.batch_size // self.ranks
        return rows[self.rank * share :][:share]

    def _named(self, samples: Samples, rows: Tensor, inputs: Tensor) -> Batch:
        if self.data.kind == "pictures":
            channels, *size = self.shape
            if list(inputs.shape[2:]) != size:
                inputs = F.interpolate(inputs, size=size, mode="bilinear", antialias=True)
            inputs = inputs.expand(-1, channels, -1, -1).contiguous().to(self.dtype)
        beside = {name: tensor[rows] for name, tensor in samples.beside.items()}
        return {self.inputs: inputs, **beside, "labels": samples.labels[rows]}


def _generator(purpose: str, seed: int, place: int) -> torch.Generator:
    """Return a generator for a place of a run; torch's CPU generator reads the low 32 bits of a seed only."""
    digest = hashlib.sha256(f"{purpose} {seed} {place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4]))


def feed(case: TrainingCase, workload: Workload, task: Task | None, group: ProcessGroup) -> Feed:
    """Load a run's data set for its model, which was built for ``task`` (None where a function does not say).

    Raises:
        UsageError: The data set is unknown or missing, or it and the model do not go together.
    """
    example = workload.batch(1, seed=0)
    inputs = next((name for name in ("images", "pixel_values", "input_ids") if name in example), None)
    if inputs is None or "labels" not in example:
        raise UsageError(f"{case.model} cannot be trained on data sets: its batches hold {', '.join(example)}")
    shape, labels, wanted = tuple(example[inputs].shape[1:]), example["labels"], data.kind_of(case.data)
    kind = "pictures" if inputs != "input_ids" else "language" if labels.dim() > 1 else "sentences"
    if labels.is_floating_point():
        kind = "ratings" if kind == "sentences" and labels.dim() == 1 else "other"
    if task not in (None, *_TASKS) or "decoder_input_ids" in example or kind != wanted:
        raise UsageError(f"the data set {case.data} is for {_MODELS[wanted]}; {case.model} is none")
    found = data.load(case, shape[0] if inputs == "input_ids" else 0)
    if found.kind == "pictures" and (channels := found.train.inputs.shape[1]) not in (1, shape[0]):
        raise UsageError(f"{case.data} has pictures of {channels} channels; {case.model} takes {shape[0]}")
    if len(found.train) < case.batch_size:
        raise UsageError(f"batch_size {case.batch_size}: {case.data} has {len(found.train)} training samples")
    parts = case.processes * case.gradient_accumulation
    if case.batch_size % parts:
        raise UsageError(
            f"batch_size {case.batch_size} cannot be cut into {parts} equal parts: {case.processes} processes with "
            f"gradient_accumulation {case.gradient_accumulation} each; make it a multiple of {parts}"
        )
    return Feed(found, inputs, shape, example[inputs].dtype, case.batch_size, case.seed, group.rank, group.size)
