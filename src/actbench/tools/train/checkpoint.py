"""Checkpoints of a training run: all that the next step depends on, in one file of tensors and plain values.

Where a run is spread over processes, the first one stores the whole tensors, and each what it alone holds.
"""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from actbench.errors import StoreError, first_line
from actbench.model.data import Data
from actbench.ops.noise import restore_seeds, saved_seeds
from actbench.packing.forwardwrapper import adapt, adapted_states
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import Evaluation, TrainingCase
from actbench.tools.train.step import LearningStep

FILE_NAME = "checkpoint.pt"
SCHEMA_VERSION = 6

_EARLIER_NAME = "checkpoint.json"
"""The file of checkpoints of actbench before version 5 of this schema."""


class Progress(Data):
    """How far a run is.

    Attributes:
        torch: Version that wrote it.
        threads: Threads of the processor that it used: sums may differ in their last bits with others.
    """

    schema_version: int = SCHEMA_VERSION
    case: TrainingCase
    torch: str
    threads: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    diverged_at: int | None
    resumed_at: tuple[int, ...]


@runtime_checkable
class HoldsLocalState(Protocol):
    """An optimizer that can return this process's part of its state, where parameters are spread over several."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return this part as it is stored; ``load_state_dict`` takes it in equally many processes."""
        ...


def state_of(step: LearningStep, group: ProcessGroup) -> dict[str, Any]:
    """Return the whole state of a run, however it is spread over processes; all of them must call this.

    It holds parameters and buffers, those that ``state_dict`` leaves out too, what the scheme has adapted, the state of
    torch's generators, and the seeds that sketches and rounding would have next.

    Raises:
        StoreError: The state of the optimizer or of the scheme holds more than tensors and plain values.
    """

    def kept(tensor: Any, by_each: bool = False) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        whole = step.parallel.full_tensor(tensor.detach())  # all processes take part, also where they keep nothing
        return whole.cpu().clone() if by_each or group.is_first else None

    def is_own(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and step.parallel.is_own(leaf)

    optimizer, module = step.optimizer, step.setup.module
    held = optimizer.local_state_dict() if isinstance(optimizer, HoldsLocalState) else optimizer.state_dict()
    adapted = adapted_states(module)
    _check_plain({"optimizer": held, "adapted": adapted})
    mine = {
        "optimizer": tree_map(lambda leaf: kept(leaf, by_each=True) if is_own(leaf) else None, held),
        "adapted": tree_map(lambda tensor: kept(tensor, by_each=True), adapted),
        "seeds": saved_seeds(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }
    return {
        "tensors": tree_map(kept, _named(module)),
        "optimizer": tree_map(lambda leaf: None if is_own(leaf) else kept(leaf), held),
        "scaler": step.scaler.state_dict(),
        "ranks": group.all_gather(mine),
    }


def restore(state: dict[str, Any], step: LearningStep, group: ProcessGroup) -> None:
    """Bring a new model, its optimizer and torch's generators to a checkpoint; a StoreError if it does not fit."""
    module, parallel = step.setup.module, step.parallel
    try:
        mine = state["ranks"][group.rank]
        with torch.no_grad():
            for name, tensor in _named(module).items():
                tensor.copy_(parallel.local_like(tensor, state["tensors"][name]))
        own, shared = mine["optimizer"], state["optimizer"]
        step.optimizer.load_state_dict(tree_map(lambda here, there: there if here is None else here, own, shared))
        for parameter, kept in step.optimizer.state.items():  # shares of state, like those of the parameters
            for name, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = parallel.local_like(parameter, value)
        step.scaler.load_state_dict(state["scaler"])
        adapt(module, mine["adapted"])
        torch.set_rng_state(mine["cpu"])
        if mine["cuda"] is not None:
            torch.cuda.set_rng_state(mine["cuda"])
        if mine["seeds"]:  # else none had been drawn yet
            restore_seeds(mine["seeds"])
    except (LookupError, ValueError, RuntimeError) as error:
        raise StoreError(f"the checkpoint does not fit the model: {error}; run again with --force") from error


def _check_plain(tree: Any) -> None:
    """Refuse what torch would not load again from weights alone."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        # a class of its own that derives from these is refused when it is read
        if not isinstance(leaf, Tensor) and type(leaf) not in (bool, int, float, str, type(None)):
            raise StoreError(
                f"{keystr(path)}: a {type(leaf).__name__} cannot be written to a checkpoint; state_dict must hold "
                "tensors, numbers, text, lists, tuples and dicts only"
            )


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a run's checkpoint; made by the first one."""

    path: Path

    def write(self, progress: Progress, state: dict[str, Any]) -> None:
        """Replace the checkpoint; after a StoreError, when it cannot be written, the one before is still there."""
        staged = self.path / f"{FILE_NAME}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with staged.open("wb") as file:
                torch.save({"progress": progress.model_dump_json(), **state}, file)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self.path / FILE_NAME)
        except (OSError, RuntimeError) as error:  # torch tells a full disk by the second
            raise StoreError(f"{self.path}: the checkpoint cannot be written: {error}; make room there") from error

    def read(self, case: TrainingCase) -> tuple[Progress, dict[str, Any]] | None:
        """Return the checkpoint of a run, or None; a StoreError if it is broken, or of another run or version."""
        file, earlier = self.path / FILE_NAME, self.path / _EARLIER_NAME
        if not file.exists():
            if earlier.exists():
                raise StoreError(
                    f"{earlier} was written by an earlier version of actbench, which this one does not read; remove "
                    "the folder, and the run starts afresh"
                )
            return None
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            progress = Progress.model_validate_json(state.pop("progress"))
        except (OSError, EOFError, LookupError, RuntimeError, pickle.UnpicklingError, ValidationError) as error:
            raise StoreError(
                f"{file} cannot be read: {first_line(error)}; remove the folder, and the run starts afresh"
            ) from None
        if progress.case != case or progress.schema_version != SCHEMA_VERSION:
            raise StoreError(f"{file} is of another run or version; remove the folder to start afresh")
        return progress, state

    def remove(self) -> None:
        """Remove the checkpoint, and the folder around it if it held no other."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
