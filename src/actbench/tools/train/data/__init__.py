"""Data sets to train on: pictures, text to continue, and sentences to classify or to rate."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.tools.train.records import Metric, TrainingCase

Kind = Literal["pictures", "language", "sentences", "ratings"]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Samples:
    """What a model is shown and should answer.

    Attributes:
        inputs: Pictures ``(n, channels, height, width)`` float32, or token ids ``(n, length)`` int64.
        labels: Classes ``(n,)`` int64; for language the ids themselves; ratings ``(n,)`` float32.
        beside: Further inputs by name: ``attention_mask (n, length)``, say.
    """

    inputs: Tensor
    labels: Tensor
    beside: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class DataSet:
    """Samples to train on and samples to evaluate on.

    Attributes:
        kind: ``pictures`` and ``sentences`` are classified, ``language`` is continued token by token, ``ratings`` are
            predicted for sentences.
        classes: Classes of the labels; for language, tokens; for ratings, 1.
        vocabulary: How many tokens there are; None for pictures.
        augment: Changes a batch of training inputs at random.
    """

    name: str
    kind: Kind
    train: Samples
    validation: Samples
    classes: int
    vocabulary: int | None = None
    metric: Metric = "accuracy"
    augment: Augment | None = None


__all__ = ["DataSet", "Kind", "Samples", "kind_of", "load", "names"]

_KINDS: dict[str, Kind] = {
    "digits": "pictures",
    "text": "language",
    "reviews": "sentences",
    "cifar10": "pictures",
    "cifar100": "pictures",
    "sst2": "sentences",
    "mrpc": "sentences",
    "rte": "sentences",
    "stsb": "ratings",
    "imdb": "sentences",
}


def names() -> list[str]:
    """Return the names of the data sets."""
    return list(_KINDS)


def kind_of(name: str) -> Kind:
    """Return the kind of a data set without loading it; a UsageError if there is none of this name."""
    if name not in _KINDS:
        close = difflib.get_close_matches(name, _KINDS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"there is no data set {name!r}; {hint}known: {', '.join(_KINDS)}")
    return _KINDS[name]


def load(case: TrainingCase, length: int) -> DataSet:
    """Load the data set of a run with samples of ``length`` tokens; pictures have none.

    Raises:
        UsageError: There is no such data set, a library that reads it is missing, or its files are.
    """
    kind_of(case.data)
    from actbench.tools.train.data import generated, pictures

    match case.data:
        case "digits":
            return pictures.load_digits()
        case "cifar10" | "cifar100":
            return pictures.load_cifar(int(case.data.removeprefix("cifar")))
        case "text":
            return generated.load_text(length)
        case "reviews":
            return generated.load_reviews(length)
    from actbench.tools.train.data import sentences

    return sentences.load(case, length)
