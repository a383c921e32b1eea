"""Writing a folder as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actbench.errors import StoreError
from actbench.paths import check_makeable
from actbench.units import format_bytes


@contextmanager
def staged(folder: Path, *, replaceable: bool) -> Iterator[Path]:
    """Give a new folder to write into, which becomes ``folder`` when the block ends without an exception.

    The new folder is a hidden sibling, so that the last step is a rename within one file system. After an exception,
    an interrupt included, it is gone and ``folder`` is as it was.

    Args:
        folder: The folder to make; missing parents are made too.
        replaceable: Whether what stands at ``folder`` may be replaced.

    Raises:
        StoreError: ``folder`` is taken, or it or its parents cannot be written.
    """
    folder = folder.resolve()
    stage = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    with _writing(folder):
        refuse_taken(folder, replaceable=replaceable)
        folder.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
    try:
        yield stage
        with _writing(folder):
            _put_in_place(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # gone already when all went well


def refuse_taken(folder: Path, *, replaceable: bool) -> None:
    """Raise a StoreError unless a folder is free: absent, empty, or holding what may be replaced."""
    if not os.path.exists(folder):
        check_makeable(folder)
        return
    if not folder.is_dir():
        raise StoreError(f"{folder} is a file, not a folder; choose another folder with --output")
    if any(folder.iterdir()) and not replaceable:
        raise StoreError(
            f"{folder} is not empty; choose another with --output (--force replaces a folder that actbench wrote)"
        )


def refuse_full_disk(folder: Path, needed_bytes: int) -> None:
    """Raise a StoreError if the disk on which a folder would be made has less free than is needed."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise StoreError(
            f"{folder} needs {format_bytes(needed_bytes)} and its disk has {format_bytes(free)} free; make room, or "
            "choose a folder on another disk with --output"
        )


def _put_in_place(stage: Path, folder: Path) -> None:
    if not folder.exists():
        stage.rename(folder)
        return
    aside = stage.with_suffix(".old")
    folder.rename(aside)
    try:
        stage.rename(folder)
    except BaseException:
        aside.rename(folder)
        raise
    shutil.rmtree(aside)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written: {error.strerror or error}; choose another with --output"
        ) from error
