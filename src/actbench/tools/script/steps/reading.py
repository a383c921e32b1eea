"""What a step of a script needed: from events, and what was held at its end, to a measurement."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from actbench.measuring.meters import footprint
from actbench.measuring.meters.meter import MemoryReading
from actbench.measuring.meters.peak import Communicated, Event, Moments, alive
from actbench.measuring.meters.stepevents import UNKNOWN, Origin, StepEvents
from actbench.model.ledger import OUTSIDE
from actbench.model.measured import Measurement
from actbench.model.records import Built
from actbench.model.timeline import OPTIMIZER
from actbench.ops.simulation import plain_tensors
from actbench.tools.script.steps import sharing
from actbench.tools.script.steps.counting import Step
from actbench.tools.script.steps.lines import Lines
from actbench.tools.script.steps.schemes import trained


class Names(Protocol):
    """Names the storages of tensors."""

    def names(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the names in events of the storages of tensors, as far as these are counted."""

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory that is not counted."""


@dataclass(frozen=True)
class Held:
    """What a script held on the card when a step ended: names of storages, and bytes.

    Attributes:
        copies: Storages that are made of weights alone, such as their averages; they are no part of ``weights_bytes``.
        copies_apart: Those that were made without gradients.
        owners: The origin of each storage of a parameter, a buffer, a gradient and optimizer state.
        dtype: Types of the parameters.
        autocast: The types in which autocast computes where gradients are needed; None without autocast.
        models: Classes of the models that ran; ``optimizers`` those of the optimizers.
        head: As of :class:`actbench.model.records.Built`.
        tensor_parallel: How many processes share the layers of one batch.
    """

    weights: set[int]
    weights_bytes: int
    state: set[int]
    state_bytes: int
    copies: set[int]
    copies_apart: set[int]
    owners: dict[int, Origin]
    dtype: str | None
    autocast: str | None
    models: str
    optimizers: str
    head: str | None
    tensor_parallel: int

    @property
    def of_model(self) -> Set[int]:
        """Names of storages that belong to weights, gradients and optimizer state."""
        return self.weights | self.copies | self.state | self.owners.keys()


def held(tracker: Names, lines: Lines, optimizers: Sequence[torch.optim.Optimizer]) -> Held:
    """Return what a script holds now."""

    def on_card(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [each for each in plain_tensors(*tensors) if not tracker.leaves_out(each)]

    kept = on_card(others(lines.roots))
    weights = on_card(tensor for root in lines.roots for tensor in footprint.weights(root))
    weights += [tensor for tensor in kept if tracker.names([tensor])]
    state = on_card(each for optimizer in optimizers for each in footprint.optimizer_state(optimizer))
    names = tracker.names(weights)
    return Held(
        weights=names,
        weights_bytes=footprint.stored_bytes(weights),
        state=tracker.names(state),
        state_bytes=footprint.stored_bytes(state),
        copies=(copies := lines.copies.of(names)),
        copies_apart=copies & lines.copies.apart,
        owners=dict(_owners(tracker, lines, optimizers)),
        dtype=footprint.types(nn.ModuleList(lines.roots)),
        autocast="+".join(lines.autocast) or None,
        models="+".join(dict.fromkeys(type(_inner(root)).__name__ for root in lines.roots)) or "none",
        optimizers="+".join(dict.fromkeys(type(each).__name__ for each in optimizers)),
        head=head_of([root for root, _ in trained(lines.roots, optimizers)]),
        tensor_parallel=sharing.tensor_parallel(lines.roots),
    )


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside of a wrapper of torch, such as the one that averages gradients over processes."""
    is_torchs = type(model).__module__.startswith(("torch.nn.parallel.", "torch.distributed."))
    return _inner(model.get_submodule("module")) if is_torchs and list(model._modules) == ["module"] else model


def others(roots: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of all other modules: of frozen averages, and of models called in parts."""
    own = {id(part) for root in roots for part in root.modules()}
    alive = gc.get_objects()  # while this list lives, no tuple can be made from a generator over it
    kinds = {kind for kind in set(map(type, alive)) if issubclass(kind, nn.Module)}
    found = [each for each in alive if type(each) in kinds and id(each) not in own]
    del alive
    kept = [vars(each).get(name) or {} for each in found for name in ("_parameters", "_buffers")]
    return [tensor for tensors in kept for tensor in tensors.values() if isinstance(tensor, Tensor)]


def head_of(models: Sequence[nn.Module]) -> str | None:
    """Return the path of the layer that makes the logits of a single model: outside of lists of blocks, most outputs.

    It is empty if the model names the layer itself, and None if there is no such layer or no single model.
    """
    if len(models) != 1:
        return None
    with suppress(Exception):  # it has no such method, or the user's own code fails
        if type(models[0].get_output_embeddings()) is nn.Linear:  # type: ignore[operator]
            return ""
    paths = dict(models[0].named_modules())
    lists = tuple(f"{path}." for path, each in paths.items() if isinstance(each, nn.ModuleList))  # of blocks
    layers = [
        (each.out_features, path)
        for path, each in paths.items()
        if type(each) is nn.Linear and not path.startswith(lists)
    ]
    largest = max(layers, default=(0, ""))
    others = [count for count, path in layers if path != largest[1]]
    return largest[1] if largest[1] and all(count < largest[0] for count in others) else None


def _owners(tracker: Names, lines: Lines, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, Origin]]:
    """Yield storages with the modules of their parameters, on the lines that made them.

    A gradient is made by the line that began its backward pass.
    """
    paths: dict[int, str] = {}

    def names(tensors: Sequence[Tensor]) -> set[int]:
        return tracker.names([*plain_tensors(*tensors)])

    def owned(path: str, what: str, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Origin]]:
        for name in names(tensors):
            made = lines.origins.get(name)
            yield name, Origin(path, what, made.line if made else "")

    for module in (part for root in lines.roots for part in root.modules()):
        path = lines.path_of(module)
        for parameter in module.parameters(recurse=False):
            paths[id(parameter)] = path
            yield from owned(path, "parameter", [parameter])
            if parameter.grad is not None:
                yield from ((name, lines.of_gradient(name, path)) for name in names([parameter.grad]))
        yield from owned(path, "buffer", list(module.buffers(recurse=False)))
    for optimizer in optimizers:
        what = f"{type(optimizer).__name__} state"
        for owner, kept in optimizer.state.items():
            yield from owned(paths.get(id(owner), OPTIMIZER), what, footprint.tensors_in(kept))


def _kept(events: Sequence[Event], earlier: Sequence[Step], origins: Mapping[int, Origin]) -> Iterator[int]:
    """Yield names of what earlier steps made: all but what the first one made outside of modules, such as its data."""
    born: dict[int, int] = {}
    for place, (name, _) in enumerate(events[: earlier[-1].ended] if earlier else ()):
        born.setdefault(name, place)
    for name, place in born.items():
        if place >= earlier[0].ended or origins.get(name, UNKNOWN).module not in (UNKNOWN.module, OUTSIDE):
            yield name


def measurement(
    step: Step,
    found: Held,
    events: Sequence[Event],
    *,
    origins: Mapping[int, Origin],
    memory_bytes: int,
    warnings: tuple[str, ...],
    communicated: Communicated | None = None,
    moved: Set[int] = frozenset(),
    earlier: Sequence[Step] = (),
    workspaces: Collection[int] = (),
    cached: Set[int] = frozenset(),
    engines: Set[int] = frozenset(),
    trains: bool = True,
    built: Built | None = None,
    **more: Any,
) -> Measurement:
    """Return the measurement of a step that has ended.

    Args:
        step: The step.
        found: What was held at its end.
        events: All events from the beginning of the script to the end of the step.
        origins: Who made each storage.
        memory_bytes: Memory that the step may use.
        warnings: Remarks on the figures.
        communicated: What collectives read and write.
        moved: Names of storages that were moved to the card.
        earlier: The steps before it.
        workspaces: Names of the workspaces of matrix products that stay.
        cached: Names of what caches of keys and values held.
        engines: Names of what engines of inference take of the card.
        trains: Whether anything is trained; else the step is all that the script did.
        built: What is known of the models; None for their classes alone.
        more: Other fields of :class:`actbench.measuring.meters.meter.MemoryReading`.
    """
    moments = Moments(step.begun, step.forwards or [(step.begun, step.begun)], step.updating)
    kinds = moments.kinds(
        events,
        weights=found.weights,
        state=found.state,
        gradients=step.gradients,
        communicated=communicated,
    )
    kinds |= dict.fromkeys(cached, "cache")
    kinds |= dict.fromkeys(engines, "engine")
    kinds |= {name: "batch" for name in moved if kinds.get(name, "saved") == "saved"}
    kinds |= {name: "weights" for name in found.copies if kinds.get(name) == "batch"}
    kinds |= {name: "weights" for name in found.copies_apart if kinds.get(name) == "saved"}
    kept = _kept(events, [each for each in earlier if each.ended <= step.begun], origins)
    kinds |= {name: "kept" for name in kept if kinds.get(name) == "batch" and name not in moved}
    for name in workspaces:  # were there before the step, and are no batch
        kinds.pop(name, None)
    before = list(alive(events[: step.begun]).items())
    copied = sum(amount for name, amount in before if name in found.copies and kinds.get(name) == "weights")
    shift = len(before) - step.begun
    passes = [(phase, at) for each in step.forwards for phase, at in zip(("forward", "backward"), each, strict=True)]
    spans = [(phase, at + shift) for phase, at in (*passes, ("optimizer", step.updating))]
    whole = StepEvents(
        events=[*before, *events[step.begun :]],
        before=len(before),
        peak_at=step.peak_at + shift,
        spans=spans,  # type: ignore[arg-type]
        kinds=kinds,
        origins={**origins, **found.owners},
    )
    first, last = moments.forwards[-1]
    # neither the batch, which is moved to the card meanwhile, nor what the script still holds of the step before
    older = alive(events[:first]).keys() | moved | step.gradients
    made_bytes = sum(amount for name, amount in alive(events[:last]).items() if name not in older)
    read = MemoryReading(
        weights_bytes=found.weights_bytes + copied,
        gradients_bytes=step.gradients_bytes,
        optimizer_bytes=found.state_bytes,
        activation_bytes=made_bytes,
        peak_bytes=step.peak_bytes,
        peak_phase=moments.phase(step.peak_at) if trains else "generation",
        phase_peaks=moments.peaks(events, step.updating, 0) if trains else None,
        peak_parts=moments.parts(events, step.peak_at, kinds),
        **more,
    ).against(memory_bytes)
    read = read if trains else replace(read, remedies=())
    return Measurement(
        **vars(read),
        dtype=found.dtype,
        autocast=found.autocast,
        optimizer=found.optimizers or None,
        built=(built or Built(model_class=found.models)).model_copy(update={"head": found.head}),
        warnings=tuple(warnings),
        timeline=whole.timeline(),
    )
