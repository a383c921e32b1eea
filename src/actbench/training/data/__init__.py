"""Data sets to train on: pictures, text to go on with, and sentences to tell apart or to rate."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from actbench.errors import UsageError
from actbench.results.runs import TrainingCase
from actbench.training.data.samples import DataSet, Kind, Samples

__all__ = ["DataSet", "Kind", "Samples", "kind_of", "load", "names"]


Load = Callable[[TrainingCase, int], DataSet]


def _digits(case: TrainingCase, length: int) -> DataSet:
    from actbench.training.data import digits

    return digits.load()


def _text(case: TrainingCase, length: int) -> DataSet:
    from actbench.training.data import text

    return text.load(length)


def _reviews(case: TrainingCase, length: int) -> DataSet:
    from actbench.training.data import reviews

    return reviews.load(length)


def _cifar(classes: int) -> Load:
    def load(case: TrainingCase, length: int) -> DataSet:
        from actbench.training.data import cifar

        return cifar.load(classes)

    return load


def _sentences(case: TrainingCase, length: int) -> DataSet:
    from actbench.training.data import sentences

    return sentences.load(case, length)


_LOADERS: dict[str, tuple[Kind, Load]] = {
    "digits": ("pictures", _digits),
    "text": ("language", _text),
    "reviews": ("sentences", _reviews),
    "cifar10": ("pictures", _cifar(10)),
    "cifar100": ("pictures", _cifar(100)),
    "sst2": ("sentences", _sentences),
    "mrpc": ("sentences", _sentences),
    "rte": ("sentences", _sentences),
    "stsb": ("ratings", _sentences),
    "imdb": ("sentences", _sentences),
}


def names() -> list[str]:
    """Return the names of the data sets."""
    return list(_LOADERS)


def kind_of(name: str) -> Kind:
    """Return the kind of a data set without loading it.

    Raises:
        UsageError: There is no such data set.
    """
    return _known(name)[0]


def load(case: TrainingCase, length: int) -> DataSet:
    """Load the data set of a run.

    Args:
        case: Names one of :func:`names`, and what makes tokens of sentences.
        length: Tokens of a sample; pictures have none.

    Raises:
        UsageError: There is no such data set, a library that reads it is missing, or its files are.
    """
    return _known(case.data)[1](case, length)


def _known(name: str) -> tuple[Kind, Load]:
    if name not in _LOADERS:
        close = difflib.get_close_matches(name, _LOADERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"there is no data set {name!r}; {hint}known: {', '.join(_LOADERS)}")
    return _LOADERS[name]
