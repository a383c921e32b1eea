"""Pictures: digits that come with scikit-learn, and CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their binary version.

Nothing is ever unpickled. A file of CIFAR is rows of one label byte, two in CIFAR-100 (coarse, fine), and 3072 bytes: a
red, a green and a blue plane of 32 x 32.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actbench.caches import user_cache
from actbench.errors import UsageError
from actbench.tools.train.data import DataSet, Samples

BRIGHTEST = 16.0
VALIDATION = 360  # a fifth
_SPLIT_SEED = 0  # the same pictures are held back whatever the seed of a run


def load_digits() -> DataSet:
    """Return UCI's optdigits, ``(n, 1, 8, 8)`` float32 of mean 0 and variance 1: 1437 to train on, 360 held back.

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


FOLDER_VARIABLE = "ACTBENCH_DATA"
PIXELS = 3 * 32 * 32
_PAD = 4
_FILES = {
    10: ("cifar-10-batches-bin", [f"data_batch_{place}.bin" for place in range(1, 6)], ["test_batch.bin"]),
    100: ("cifar-100-binary", ["train.bin"], ["test.bin"]),
}
_ARCHIVES = {
    10: ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    100: ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
}


def load_cifar(classes: int) -> DataSet:
    """Return the pictures ``(n, 3, 32, 32)`` float32 of mean 0 and variance 1 by channel; the test split is held back.

    Training pictures are moved by up to 4 px and mirrored at random. The files are looked for below the folder that
    ``ACTBENCH_DATA`` names, or the user's cache folder, and fetched by torchvision where they are missing.

    Raises:
        UsageError: The files are not there and cannot be fetched, or are no files of CIFAR.
    """
    name, train_files, test_files = _FILES[classes]
    folder = data_folder() / name
    if not folder.is_dir():
        _fetch(classes, folder)
    train, test = (_read_cifar(folder, files, classes) for files in (train_files, test_files))
    mean, spread = train.inputs.mean((0, 2, 3), keepdim=True), train.inputs.std((0, 2, 3), keepdim=True)
    return DataSet(
        name=f"cifar{classes}",
        kind="pictures",
        train=Samples((train.inputs - mean) / spread, train.labels),
        validation=Samples((test.inputs - mean) / spread, test.labels),
        classes=classes,
        augment=moved_and_mirrored,
    )


def data_folder() -> Path:
    """Return the folder of fetched data sets."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given).expanduser() if given else user_cache() / "data"


def moved_and_mirrored(images: Tensor, random: torch.Generator) -> Tensor:
    """Move each picture ``(n, c, h, w)`` by up to 4 px in both directions, zeros moving in, and mirror half of them."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (_PAD,) * 4)
    down, right = torch.randint(2 * _PAD + 1, (2, count), generator=random)
    mirrored = torch.rand(count, generator=random) < 0.5
    rows = down[:, None] + torch.arange(height)
    columns = right[:, None] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    samples = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _fetch(classes: int, folder: Path) -> None:
    from actbench.workload.torchvision import fetch_archive

    url, md5 = _ARCHIVES[classes]
    try:
        fetch_archive(url, folder.parent, md5)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"the data set cifar{classes} is not at {folder} and cannot be fetched from {url}: {error}; unpack that "
            f"archive below a folder of your choice and name the folder in {FOLDER_VARIABLE}"
        ) from None


def _read_cifar(folder: Path, files: list[str], classes: int) -> Samples:
    label_bytes = 1 if classes == 10 else 2
    parts = [_rows(folder / file, label_bytes + PIXELS) for file in files]
    rows = torch.cat(parts)
    labels = rows[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise UsageError(f"{folder}: holds a label {int(labels.max())}; cifar{classes} has {classes} classes")
    return Samples(rows[:, label_bytes:].view(-1, 3, 32, 32).float() / 255, labels)


def _rows(file: Path, row_bytes: int) -> Tensor:
    try:
        content = np.fromfile(file, dtype=np.uint8)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; fetch the data set again") from None
    if not len(content) or len(content) % row_bytes:
        raise UsageError(f"{file} has {len(content)} bytes, no multiple of {row_bytes}: it is not a file of CIFAR's")
    return torch.from_numpy(content).view(-1, row_bytes)
