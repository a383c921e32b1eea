"""The origins of storages in a step that a meter reads: the module and the operator of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten_with_path

from actbench.measuring.inspection.recorder import Around, RunningModules
from actbench.measuring.meters import footprint
from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.model.ledger import OUTSIDE
from actbench.model.timeline import BATCH, OPTIMIZER, Kind, Timeline
from actbench.packing import savedtensors
from actbench.scheme.setup import TrainStep
from actbench.scheme.wrapped import HoldsShares


@dataclass(frozen=True)
class HeldStorage:
    """A storage that exists before a step, or between its parts."""

    kind: Kind
    origin: Origin
    storage: UntypedStorage


class Watch:
    """Follows a step for a meter: :meth:`Meter.memory` fills it, and :meth:`timeline` returns the result.

    No module is known for a model whose modules do not run one by one, such as a compiled one.

    Attributes:
        origins: The origin of each storage, by its name in the meter's events.
        events: The allocations and frees; None until the step was read.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.origins: dict[int, Origin] = {}
        self.events: StepEvents | None = None
        self._modules: RunningModules | None = None

    def read(self) -> StepEvents:
        """Return the events of the step."""
        if self.events is None:
            raise RuntimeError("no meter has read the step")
        return self.events

    def timeline(self) -> Timeline:
        """Return the timeline of the step."""
        return self.read().timeline()

    @contextmanager
    def watching(self, around: Around | None = None) -> Iterator[None]:
        """Inside the block, follow modules and packed tensors; ``around`` is called for each module that runs."""
        with savedtensors.observing():
            if self.step.setup.limits.untraceable:
                yield
                return
            module = self.step.setup.module
            self._modules = RunningModules(module, around)
            with self._modules.watching():
                yield

    def made(self, name: int, func: Any) -> None:
        """Note that an operator makes a storage now."""
        self.origins[name] = Origin(self._running(), "unknown" if func is None else func._schema.name)

    def made_node(self, sequence_number: int) -> str:
        """Return the path of the module that made a node of autograd's graph."""
        return OUTSIDE if self._modules is None else self._modules.made_node(sequence_number)

    def _running(self) -> str:
        running = OUTSIDE if self._modules is None else self._modules.running
        if running != OUTSIDE:
            return running
        node: Node | None = torch._C._current_autograd_node()
        if node is not None:
            return self.made_node(node._sequence_nr())
        return OPTIMIZER if self.step.phase == "optimizer" else OUTSIDE


def before(step: TrainStep) -> list[HeldStorage]:
    """Return the storages alive before a step, each once: weights, optimizer state and the batch."""
    found: dict[int, HeldStorage] = {}
    batch, _ = tree_flatten_with_path(dict(step.batch))
    inputs = [
        (Origin(BATCH, ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)), [leaf])
        for path, leaf in batch
        if isinstance(leaf, Tensor)
    ]
    buckets = [(Origin(OPTIMIZER, "gradient bucket"), footprint.lasting_gradients(step))]
    groups = (("weights", weights(step)), ("optimizer", state(step)), ("batch", inputs), ("gradients", buckets))
    for kind, held in groups:
        for origin, tensors in held:
            for storage in footprint.storages(tensors):
                found.setdefault(id(storage), HeldStorage(kind, origin, storage))  # type: ignore[arg-type]
    return list(found.values())


Owned = list[tuple[Origin, list[Tensor]]]
"""Tensors with their origins."""


def weights(step: TrainStep) -> Owned:
    """Return parameters and buffers with the modules that hold them."""
    module = step.setup.module
    named = (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
    return [(Origin(name.rpartition(".")[0], what), [tensor]) for what, found in named for name, tensor in found]


def state(step: TrainStep) -> Owned:
    """Return the optimizer's state for each parameter, with the module of the parameter."""
    what = f"{step.optimizer_class} state"
    paths = _paths(step)
    return [
        (Origin(paths.get(id(parameter), OPTIMIZER), what), footprint.tensors_in(kept))
        for parameter, kept in step.optimizer.state.items()
    ]


def gradients(step: TrainStep) -> Owned:
    """Return the gradients with the modules of their parameters, and those that the optimizer stores."""
    owned = [
        (Origin(name.rpartition(".")[0], "gradient"), [parameter.grad])
        for name, parameter in step.setup.module.named_parameters()
        if parameter.grad is not None
    ]
    return [*owned, (Origin(OPTIMIZER, "gradient"), footprint.gradients(step))]


def _paths(step: TrainStep) -> Mapping[int, str]:
    found = {id(parameter): name.rpartition(".")[0] for name, parameter in step.setup.module.named_parameters()}
    if not isinstance(step.optimizer, HoldsShares):
        return found
    return {share: found[id(whole)] for share, whole in step.optimizer.wholes.items() if id(whole) in found}
