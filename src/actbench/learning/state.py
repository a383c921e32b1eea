"""Everything that the next step of a run depends on, taken out of it and put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actbench.errors import StoreError
from actbench.learning.checkpoint import Checkpoint
from actbench.learning.spreading import Spread
from actbench.learning.step import LearningStep
from actbench.learning.team import Team
from actbench.learning.trees import put_together, take_apart
from actbench.nn.adapted import adapt, adapted_states


@dataclass(frozen=True)
class State:
    """Everything that the next step depends on: trees as JSON has them, and all their tensors by name.

    Attributes:
        optimizer: The optimizer's tree.
        scaler: That of what scales the loss.
        adapted: That of the scheme, of each process by rank.
    """

    optimizer: Any
    scaler: Any
    adapted: tuple[Any, ...]
    tensors: dict[str, Tensor]


def state_of(step: LearningStep, team: Team) -> State:
    """Return the state of a run, whole, however it is spread over processes; all of them must ask for it.

    Of the model these are parameters and buffers, those that its ``state_dict`` leaves out too, and what its scheme
    has adapted. Random numbers, those of sketches included, come of torch's generators.

    Raises:
        StoreError: The state of the optimizer or of the scheme holds more than tensors and plain values.
    """
    module = step.setup.module
    tensors = {f"model.{name}": tensor for name, tensor in _named(module).items()}
    optimizer = take_apart(step.optimizer.state_dict(), tensors, "optimizer")
    own: dict[str, Tensor] = {}
    adapted = take_apart(adapted_states(module), own, f"rank{team.rank}.adapted")
    own[f"rank{team.rank}.random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own[f"rank{team.rank}.random.cuda"] = torch.cuda.get_rng_state()
    kept = _kept(tensors, step.spread, team.leads)
    trees = []
    for tree, part in team.gathered((adapted, _kept(own, step.spread, True))):
        trees.append(tree)
        kept.update(part)
    return State(optimizer, step.scaler.state_dict(), tuple(trees), kept)


def restore(checkpoint: Checkpoint, step: LearningStep, team: Team) -> None:
    """Bring a freshly built model, its optimizer and torch's generators to where a checkpoint was written.

    Raises:
        StoreError: The checkpoint does not fit the model.
    """
    tensors, progress, module = checkpoint.tensors, checkpoint.progress, step.setup.module
    own = f"rank{team.rank}.random"
    try:
        with torch.no_grad():
            for name, tensor in _named(module).items():
                tensor.copy_(step.spread.like(tensor, tensors[f"model.{name}"]))
        step.optimizer.load_state_dict(put_together(progress.optimizer, tensors))
        _share_out(step.optimizer, step.spread)
        step.scaler.load_state_dict(progress.scaler)
        adapt(module, put_together(progress.adapted[team.rank], tensors))
        torch.set_rng_state(tensors[f"{own}.cpu"])
        if f"{own}.cuda" in tensors:
            torch.cuda.set_rng_state(tensors[f"{own}.cuda"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise StoreError(f"the checkpoint does not fit the model: {error}; run again with --force") from error


def _share_out(optimizer: torch.optim.Optimizer, spread: Spread) -> None:
    """Let each process keep its share of the optimizer state where it keeps a share of the parameters."""
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept[name] = spread.like(parameter, value)


def _kept(tensors: dict[str, Tensor], spread: Spread, wanted: bool) -> dict[str, Tensor]:
    """Return copies in host memory, or none where all the others need of this process is its share."""
    kept = {}
    for name, tensor in tensors.items():
        found = spread.whole(tensor.detach())
        if wanted:  # cloned, because safetensors refuses tensors that share a storage
            kept[name] = found.cpu().contiguous().clone()
    return kept


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
