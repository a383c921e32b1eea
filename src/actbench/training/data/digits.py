"""Handwritten digits of 8 x 8 px that come with scikit-learn (UCI optdigits, 1797 pictures, 10 classes)."""

from __future__ import annotations

import importlib

import torch

from actbench.errors import UsageError
from actbench.training.data.samples import DataSet, Samples

BRIGHTEST = 16.0
VALIDATION = 360  # a fifth
_SPLIT_SEED = 0  # the same pictures are held back whatever the seed of a run


def load() -> DataSet:
    """Return the digits, ``(n, 1, 8, 8)`` float32 of mean 0 and variance 1: 1437 to learn from, 360 held back.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise UsageError(
            "the data set digits comes with scikit-learn: install it, 'pip install scikit-learn'"
        ) from None
    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / BRIGHTEST
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held_back, kept = order[:VALIDATION], order[VALIDATION:]
    images = (images - images[kept].mean()) / images[kept].std()
    return DataSet(
        name="digits",
        kind="pictures",
        train=Samples(images[kept], labels[kept]),
        validation=Samples(images[held_back], labels[held_back]),
        classes=10,
    )
