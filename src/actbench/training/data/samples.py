from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actbench.results.runs import Metric

Kind = Literal["pictures", "language", "sentences", "ratings"]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Samples:
    """What a model is shown and should say.

    Attributes:
        inputs: Pictures ``(n, channels, height, width)`` float32, or token ids ``(n, length)`` int64.
        labels: Classes ``(n,)`` int64; for language the ids themselves; ratings ``(n,)`` float32.
        beside: What a model is told beside them, by name: ``attention_mask (n, length)``, say.
    """

    inputs: Tensor
    labels: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class DataSet:
    """Samples to learn from and samples to judge by.

    Attributes:
        kind: ``pictures`` and ``sentences`` are told apart; ``language`` is gone on with, token by token; ``ratings``
            are numbers given to sentences.
        classes: How many classes the labels have; for language, tokens; for ratings, 1.
        vocabulary: How many tokens there are; None for pictures.
        metric: What a model is judged by.
        augment: Changes a batch of training inputs at random; None changes nothing.
    """

    name: str
    kind: Kind
    train: Samples
    validation: Samples
    classes: int
    vocabulary: int | None = None
    metric: Metric = "accuracy"
    augment: Augment | None = None
