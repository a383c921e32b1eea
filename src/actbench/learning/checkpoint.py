"""Checkpoints of a training run: tensors in safetensors, the rest in JSON, written as a whole or not at all.

``checkpoint.json`` names the file of the tensors. It is put in place last, by a rename, so that a process that is
killed at any moment leaves the checkpoint before or the one after.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from actbench.errors import StoreError
from actbench.records import Data
from actbench.runs.records import Evaluation, TrainingCase

FILE_NAME = "checkpoint.json"
SCHEMA_VERSION = 3


class Progress(Data):
    """How far a run is, as ``checkpoint.json`` has it.

    Attributes:
        tensors: Name of the file of the tensors, beside this one.
        case: The run.
        torch: Version that wrote it.
        threads: Threads of the processor that it used: sums may differ in their last bits with others.
        optimizer: What the optimizer's ``state_dict`` says, tensors by their names.
        scaler: What scales the loss.
        adapted: What the scheme has learned in each process; see :mod:`actbench.nn.adapted`.
    """

    schema_version: int = SCHEMA_VERSION
    tensors: str
    case: TrainingCase
    torch: str
    threads: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    diverged_at: int | None
    resumed_at: tuple[int, ...]
    optimizer: Any
    scaler: Any
    adapted: tuple[Any, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a checkpoint."""

    progress: Progress
    tensors: dict[str, Tensor]


class CheckpointFolder:
    """The checkpoint of one run.

    Args:
        path: The folder; made by the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Write a checkpoint in place of the one before.

        Raises:
            StoreError: It cannot be written; the one before is still there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.path / progress.tensors
            save_file(tensors, file)
            _synced(file)
            staged = self.path / f"{FILE_NAME}.tmp"
            staged.write_text(progress.model_dump_json() + "\n", encoding="utf-8")
            _synced(staged)
            staged.replace(self.path / FILE_NAME)
            _synced(self.path)
            for other in self.path.glob("*.safetensors"):
                if other != file:
                    other.unlink()
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{self.path}: the checkpoint cannot be written: {error}; make room there") from error

    def read(self, case: TrainingCase) -> Checkpoint | None:
        """Return the checkpoint of a run, or None when there is none.

        Raises:
            StoreError: It is broken, or of another run.
        """
        file = self.path / FILE_NAME
        if not file.exists():
            return None
        try:
            progress = Progress.model_validate_json(file.read_bytes())
            if progress.case != case or progress.schema_version != SCHEMA_VERSION:
                raise StoreError(f"{file} is of another run or version; remove the folder to start afresh")
            with safe_open(self.path / Path(progress.tensors).name, framework="pt") as opened:
                return Checkpoint(progress, {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError, ValidationError, json.JSONDecodeError) as error:
            problem = str(error).splitlines()[0]
            raise StoreError(
                f"{file} cannot be read: {problem}; remove the folder, and the run starts afresh"
            ) from None

    def remove(self) -> None:
        """Remove the checkpoint, if there is one, and the folder around it when it held no other."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()


def _synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
