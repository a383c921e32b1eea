"""Checkpoints of a training run: all that the next step depends on.

Tensors are in safetensors, the rest in JSON. ``checkpoint.json`` names the file of the tensors and is put in place
last, by a rename, so that a process that is killed leaves the checkpoint before or the one after.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from actbench.errors import StoreError, first_line
from actbench.model.data import Data
from actbench.ops.noise import restore_seeds, saved_seeds
from actbench.packing.forwardwrapper import adapt, adapted_states
from actbench.tools.train.processgroup import ProcessGroup
from actbench.tools.train.records import Evaluation, TrainingCase
from actbench.tools.train.step import LearningStep, Parallel

_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"


def take_apart(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return a tree as JSON has it, and put its tensors into ``tensors`` under names that begin with ``name``.

    Floats survive exactly: JSON has the shortest text that reads back as the same number.

    Raises:
        StoreError: The tree holds something that neither JSON nor a tensor can say.
    """
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {_TENSOR: name}
    if isinstance(tree, Mapping):
        pairs = [[key, take_apart(value, tensors, f"{name}.{key}")] for key, value in tree.items()]
        if any(not isinstance(key, str | int) for key, _ in pairs):
            raise StoreError(f"{name}: a key that is neither text nor a number cannot be written to a checkpoint")
        return {_DICT: pairs}
    if isinstance(tree, list | tuple):
        items = [take_apart(value, tensors, f"{name}.{place}") for place, value in enumerate(tree)]
        return {_TUPLE: items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise StoreError(
        f"{name}: a {type(tree).__name__} cannot be written to a checkpoint; state_dict must hold tensors, numbers, "
        "text, lists, tuples and dicts only"
    )


def put_together(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that :func:`take_apart` wrote; a KeyError if a tensor is missing."""
    if isinstance(written, list):
        return [put_together(item, tensors) for item in written]
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _TUPLE:
        return tuple(put_together(item, tensors) for item in content)
    return {key: put_together(value, tensors) for key, value in content}


def state_of(step: LearningStep, group: ProcessGroup) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the whole state of a run, however it is spread over processes; all of them must call this.

    It holds parameters and buffers, those that ``state_dict`` leaves out too, what the scheme has adapted, the state of
    torch's generators, and the seeds that sketches and rounding would have next.

    Returns:
        The trees of optimizer, scaler and scheme as JSON has them, as fields of :class:`Progress`, and all tensors.

    Raises:
        StoreError: The state of the optimizer or of the scheme holds more than tensors and plain values.
    """
    module = step.setup.module
    tensors = {f"model.{name}": tensor for name, tensor in _named(module).items()}
    own: dict[str, Tensor] = {}
    optimizer = _optimizer_of(step, tensors, own, f"rank{group.rank}.")
    adapted = take_apart(adapted_states(module), own, f"rank{group.rank}.adapted")
    own[f"rank{group.rank}.random.cpu"] = torch.get_rng_state()
    own |= {f"rank{group.rank}.seeds.{name}": held for name, held in saved_seeds().items()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own[f"rank{group.rank}.random.cuda"] = torch.cuda.get_rng_state()
    kept = _kept(tensors, step.parallel, group.is_first)
    optimizers, trees = [], []
    for of_optimizer, tree, part in group.all_gather((optimizer, adapted, _kept(own, step.parallel, True))):
        optimizers.append(of_optimizer)
        trees.append(tree)
        kept.update(part)
    fields = {"optimizer": tuple(optimizers), "scaler": step.scaler.state_dict(), "adapted": tuple(trees)}
    return fields, kept


@runtime_checkable
class HoldsLocalState(Protocol):
    """An optimizer that can return this process's part of its state, where parameters are spread over several."""

    def local_state_dict(self) -> dict[str, Any]:
        """Return this part as it is stored; ``load_state_dict`` takes it in equally many processes."""
        ...


def _optimizer_of(step: LearningStep, tensors: dict[str, Tensor], own: dict[str, Tensor], prefix: str) -> Any:
    """Return the tree of the optimizer; what this process alone holds goes into ``own``, the rest into ``tensors``."""
    optimizer, found = step.optimizer, dict[str, Tensor]()
    state = optimizer.local_state_dict() if isinstance(optimizer, HoldsLocalState) else optimizer.state_dict()
    tree = take_apart(state, found, "optimizer")
    for name, tensor in found.items():
        if step.parallel.is_own(tensor):
            own[prefix + name] = tensor
        else:
            tensors[name] = tensor
    return tree


def restore(checkpoint: Checkpoint, step: LearningStep, group: ProcessGroup) -> None:
    """Bring a new model, its optimizer and torch's generators to a checkpoint; a StoreError if it does not fit."""
    tensors, progress, module = checkpoint.tensors, checkpoint.progress, step.setup.module
    prefix = f"rank{group.rank}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    try:
        with torch.no_grad():
            for name, tensor in _named(module).items():
                tensor.copy_(step.parallel.local_like(tensor, tensors[f"model.{name}"]))
        step.optimizer.load_state_dict(put_together(progress.optimizer[group.rank], {**tensors, **own}))
        _share_out(step.optimizer, step.parallel)
        step.scaler.load_state_dict(progress.scaler)
        adapt(module, put_together(progress.adapted[group.rank], tensors))
        torch.set_rng_state(own["random.cpu"])
        if "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"])
        seeds = {name.removeprefix("seeds."): held for name, held in own.items() if name.startswith("seeds.")}
        if seeds:  # older checkpoints have none
            restore_seeds(seeds)
    except (KeyError, ValueError, RuntimeError) as error:
        raise StoreError(f"the checkpoint does not fit the model: {error}; run again with --force") from error


def _share_out(optimizer: torch.optim.Optimizer, parallel: Parallel) -> None:
    """Shard the optimizer state like the parameters."""
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept[name] = parallel.local_like(parameter, value)


def _kept(tensors: dict[str, Tensor], parallel: Parallel, wanted: bool) -> dict[str, Tensor]:
    """Return copies in host memory, or none where others only need this process's shares."""
    kept = {}
    for name, tensor in tensors.items():
        found = parallel.full_tensor(tensor.detach())
        if wanted:  # cloned, because safetensors refuses tensors that share a storage
            kept[name] = found.cpu().contiguous().clone()
    return kept


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


FILE_NAME = "checkpoint.json"
SCHEMA_VERSION = 4


class Progress(Data):
    """How far a run is, as ``checkpoint.json`` has it.

    Attributes:
        tensors: Name of the file of the tensors, beside this one.
        torch: Version that wrote it.
        threads: Threads of the processor that it used: sums may differ in their last bits with others.
        optimizer: Its ``state_dict`` in each process, tensors by their names.
        adapted: What the scheme has learned in each process; see :mod:`actbench.packing.forwardwrapper`.
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
    optimizer: tuple[Any, ...]
    scaler: Any
    adapted: tuple[Any, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a checkpoint."""

    progress: Progress
    tensors: dict[str, Tensor]


class CheckpointFolder:
    """The folder of a run's checkpoint; made by the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        """Replace the checkpoint; after a StoreError, when it cannot be written, the one before is still there."""
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
        """Return the checkpoint of a run, or None; a StoreError if it is broken, or of another run."""
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
            problem = first_line(error)
            raise StoreError(
                f"{file} cannot be read: {problem}; remove the folder, and the run starts afresh"
            ) from None

    def remove(self) -> None:
        """Remove the checkpoint, and the folder around it if it held no other."""
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
