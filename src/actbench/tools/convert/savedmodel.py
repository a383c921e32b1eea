"""``actbench.json``, which describes a converted model in its folder, and writing a folder completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from actbench.errors import ModelError, StoreError
from actbench.model.provenance import Versions
from actbench.model.records import Case, FloatType, Site, Unreached, WorkloadSettings
from actbench.paths import check_makeable, read_bytes
from actbench.tempfiles import folder_next_to, unmark
from actbench.units import format_bytes


@contextmanager
def staged(folder: Path, *, replaceable: bool) -> Iterator[Path]:
    """Give a new folder to write into; it becomes ``folder`` when the block ends without an exception.

    The new folder is a hidden sibling, so that the last step is a rename within one file system. After an exception it
    is removed and ``folder`` is unchanged. Missing parents are made.

    Raises:
        StoreError: ``folder`` is taken and not replaceable, or the folder or its parents cannot be written.
    """
    folder = folder.resolve()
    with ExitStack() as held:
        with _writing(folder):
            refuse_taken(folder, replaceable=replaceable)
            folder.parent.mkdir(parents=True, exist_ok=True)
            stage = held.enter_context(folder_next_to(folder))
        yield stage
        with _writing(folder):
            _put_in_place(stage, folder)
            unmark(folder)


def refuse_taken(folder: Path, *, replaceable: bool) -> None:
    """Raise a StoreError unless a folder is absent, empty, or may be replaced."""
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
    """Raise a StoreError if the disk of a folder has less than ``needed_bytes`` free."""
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


FILE_NAME = "actbench.json"
SCHEMA_VERSION = 1
_LARGEST_BYTES = 16 * 1024**2  # a site takes about 200 bytes, and a model has thousands at most


class SavedModel(WorkloadSettings):
    """How to build a model again and what to apply to it.

    Attributes:
        kind: How the model is built again: by ``from_pretrained`` of transformers, by the name of a torchvision model,
            by the specification of one of actbench's own, or not at all: the reader gives the module.
        architecture: Name of the model's class.
        model: The model specification it was built from, if there was one.
        dtype: The dtype of its parameters; None if they have several, which the tensors in the folder show.
        weights_origin: Where the weights came from before they were saved.
    """

    schema_version: Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    kind: Literal["huggingface", "torchvision", "actbench", "module"]
    architecture: str
    model: str | None = None
    dtype: FloatType | None = "float32"
    scheme: str
    weights_origin: str = "unknown"
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    versions: Versions

    def case(self, model: str, *, trust_remote_code: bool = False) -> Case:
        """Return the case that builds the unconverted model from a specification."""
        return Case(
            model=model,
            **{name: getattr(self, name) for name in WorkloadSettings.model_fields},
            weights="pretrained" if self.kind == "huggingface" else "random",
            trust_remote_code=trust_remote_code,
            batch_size=1,
        )


def write(folder: Path, saved: SavedModel) -> None:
    """Write ``actbench.json`` into a folder."""
    (folder / FILE_NAME).write_text(saved.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> SavedModel:
    """Read ``actbench.json`` of a folder that is not trusted.

    Raises:
        ModelError: The file is missing, unreadable, no JSON, malformed, or of a later version of actbench.
    """
    path = folder / FILE_NAME
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is not a folder; give the folder that 'actbench convert' wrote")
    if not path.is_file():
        raise ModelError(f"{folder} holds no {FILE_NAME}; give a folder that 'actbench convert' wrote")
    data = _parse(path)
    version = data.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ModelError(
            f"{path} has schema_version {version}, written by a later actbench; this one reads up to {SCHEMA_VERSION}"
        )
    try:
        return SavedModel.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"]) or "the file"
        raise ModelError(f"{path}: {place}: {first['msg'].lower()}; convert the model again") from None


def _parse(path: Path) -> dict[str, object]:
    try:
        data = from_json(read_bytes(path, _LARGEST_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; convert the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object; convert the model again")
    return data
