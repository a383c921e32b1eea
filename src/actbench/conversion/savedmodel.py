"""``actbench.json``: what a folder of a converted model says of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from actbench.counts import PositiveInt
from actbench.errors import ModelError
from actbench.reading import read_bytes
from actbench.records import Attention, Case, Data, FloatType, Site, Task, Unreached, Versions

FILE_NAME = "actbench.json"
SCHEMA_VERSION = 1
_LARGEST_BYTES = 16 * 1024**2  # a site is about 200 bytes, and models have thousands of them, not more


class SavedModel(Data):
    """How to build a model again and what to apply to it.

    Attributes:
        kind: What writes and reads the rest of the folder: ``save_pretrained`` and ``from_pretrained`` of
            transformers, a torchvision model by its name, a network of actbench's own by its specification, or a
            module that the reader has to bring.
        architecture: Name of the model's class.
        model: The model specification it was built from, where there was one.
        dtype: The type of its parameters; None for several types, which are those of the tensors in the folder.
        scheme: Specification of the scheme that was applied.
        weights_origin: Where the weights came from before they were saved.
    """

    schema_version: Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    kind: Literal["huggingface", "torchvision", "actbench", "module"]
    architecture: str
    model: str | None = None
    task: Task = "auto"
    attention: Attention = "sdpa"
    dtype: FloatType | None = "float32"
    sequence_length: PositiveInt | None = None
    image_size: PositiveInt | None = None
    scheme: str
    weights_origin: str = "unknown"
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    versions: Versions

    def case(self, model: str, *, trust_remote_code: bool = False) -> Case:
        """Return the case that builds the unconverted model from a specification."""
        return Case(
            model=model,
            task=self.task,
            attention=self.attention,
            dtype=self.dtype,
            sequence_length=self.sequence_length,
            image_size=self.image_size,
            weights="pretrained" if self.kind == "huggingface" else "random",
            trust_remote_code=trust_remote_code,
            batch_size=1,
        )


def write(folder: Path, saved: SavedModel) -> None:
    """Write ``actbench.json`` into a folder."""
    (folder / FILE_NAME).write_text(saved.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> SavedModel:
    """Read ``actbench.json`` of a folder that anyone may have written.

    Raises:
        ModelError: It is missing, unreadable, no JSON, not of this shape, or of a later version of actbench.
    """
    path = folder / FILE_NAME
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is no folder; give the folder that 'actbench convert' wrote")
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
