"""What a model saves for backward, module by module: one training forward on fake tensors.

Bytes are counted by storage. During the forward pass, a dispatch mode notes every storage that an operator makes, and a
saved-tensors hook notes which module saves it. The storages still alive when only the loss is referenced are what the
step saves: their sum is the activation bytes. Each storage has one owner, the module that saved it first. Hooks of a
scheme (checkpointing, packing, offloading) hide the saving from our hook, since only the innermost pair of nested hooks
runs. The owner is then the module that made the storage; for packed bytes, the module whose tensor was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from actbench.errors import IdleError, NothingToConvertError
from actbench.measuring.inspection.recorder import SavedStorage, StorageRecorder, traced
from actbench.model.ledger import OUTSIDE, display_path
from actbench.model.records import Site, Unreached
from actbench.packing import savedtensors
from actbench.packing.graphs import is_reentrant
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import Part, TrainingSetup
from actbench.simulator import fake


@dataclass(frozen=True)
class Trace:
    """What the modules of a model save in one training forward.

    Attributes:
        kept: Every storage that is saved for backward, without parameters, buffers and the batch.
        calls: How often each module ran, by path.
        acted: Pairs of a module's path and the ``by`` of :func:`actbench.packing.savedtensors.acted`.
    """

    kept: tuple[SavedStorage, ...]
    calls: Mapping[str, int]
    acted: Collection[tuple[str, Hashable]] = frozenset()

    @property
    def total_bytes(self) -> int:
        """Bytes saved by the whole step."""
        return sum(kept.nbytes for kept in self.kept)

    def bytes_at(self, path: str) -> int:
        """Bytes that a module owns, without those of the modules inside it."""
        return sum(kept.nbytes for kept in self.kept if kept.owner == path)

    def bytes_under(self, path: str) -> int:
        """Bytes that a module and the modules inside it own."""
        inside = f"{path}." if path else ""
        return sum(
            kept.nbytes
            for kept in self.kept
            if kept.owner != OUTSIDE and (kept.owner == path or kept.owner.startswith(inside))
        )


def trace(setup: TrainingSetup, make_batch: Callable[[], Batch]) -> Trace:
    """Run one training forward of a setup on fake tensors, and return what it saves; see :func:`traced`."""
    with traced(setup, make_batch) as (recorder, loss):
        kept, calls = recorder.kept(), dict(recorder.calls)
        if is_reentrant(loss):
            _hear_recomputed(setup, recorder, loss)
        return Trace(kept, calls, frozenset(recorder.acted))


def _hear_recomputed(setup: TrainingSetup, recorder: StorageRecorder, loss: Tensor) -> None:
    """Run the backward pass: under a reentrant checkpoint, modules first run without gradients, and act only in it."""
    before = [(parameter, parameter.grad) for parameter in setup.module.parameters()]
    with fake.shapes_only(), recorder.modules.watching(), savedtensors.observing(recorder.acts):
        loss.backward()  # type: ignore[no-untyped-call]
    for parameter, grad in before:
        parameter.grad = grad


def inspect(before: Trace, after: Trace, setup: TrainingSetup) -> tuple[tuple[Site, ...], tuple[Unreached, ...]]:
    """Return the sites of a setup with bytes before and after, in the model's order; separately those that never run.

    Raises:
        NothingToConvertError: Nothing that a scheme converted runs; the scheme may be a part of a composition.
        IdleError: The sites run, and the step saves the same as before.
    """
    resting = refuse_idle(setup.parts, after)
    entered = {site.path for part in setup.parts if _is_heard(part, after) for site in part.sites}
    idle = [site for site in setup.sites if after.calls.get(site.path) == 0 and (site.path or "" not in entered)]
    idle += [site for site in setup.sites if site.called and site not in idle and (site.path, None) not in after.acted]
    order = {path: place for place, path in enumerate(after.calls)}
    sites = tuple(
        _read(site, before, after)
        for site in sorted(setup.sites, key=lambda site: order.get(site.path, len(order)))
        if site not in idle
    )
    if idle and not sites:
        raise _never_runs("the scheme", [site.path for site in idle])
    unreached = [Unreached(path=site.path, kind=site.was, reason=_why_idle(site, after)) for site in idle]
    known = {site.path for site in sites}
    unreached += [
        Unreached(path=site.path, kind=site.was, reason="it runs, and saves nothing that is packed")
        for part in resting
        for site in part.sites
        if site.path in known
    ]
    return sites, setup.unreached + tuple(unreached)


def refuse_idle(parts: Iterable[Part], after: Trace) -> list[Part]:
    """Raise an error if a scheme does nothing in a training step; else return the places where it does nothing.

    A scheme with ``only=`` has changed several parts, some of which may have nothing to do: a frozen norm before which
    nothing is trained, say. Sites outside modules, such as the optimizer's state, are checked only if the part has
    ``acts``.

    Raises:
        NothingToConvertError: Nothing that the scheme converted runs.
        IdleError: The sites run, and the step saves the same as before.
    """
    together: dict[Hashable, list[tuple[Part, NothingToConvertError | IdleError | None]]] = {}
    for part in parts:
        key = (part.spec, part.idle) if part.path else id(part)
        together.setdefault(key, []).append((part, _idleness(part, after)))
    for found in together.values():
        errors = [error for _, error in found if error is not None]
        if len(errors) == len(found):
            raise errors[0]
    return [part for found in together.values() for part, error in found if error is not None]


def _idleness(part: Part, after: Trace) -> NothingToConvertError | IdleError | None:
    paths = [site.path for site in part.sites if site.path in after.calls]
    acts = _is_heard(part, after) or any((path, None) in after.acted for path in paths)
    if acts or (part.acts is None and not paths):
        return None
    if paths and not any(after.calls[path] for path in (after.calls if "" in paths else paths)):
        return _never_runs(part.spec, paths)
    return IdleError(
        f"{part.spec} does nothing in a training step: at {_named(paths or [site.path for site in part.sites])} "
        f"all is as before, because {part.idle}"
    )


def _never_runs(spec: str, paths: Sequence[str]) -> NothingToConvertError:
    return NothingToConvertError(
        f"{spec}: nothing that was converted runs in a training step: {_named(paths)}; choose a scheme that works on "
        "what the step calls, or call the converted modules"
    )


def _named(paths: Sequence[str]) -> str:
    return ", ".join(display_path(path) for path in paths[:5]) + (
        f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    )


def _is_heard(part: Part, after: Trace) -> bool:
    return part.acts is not None and any(by == part.acts for _, by in after.acted)


def _read(site: Site, before: Trace, after: Trace) -> Site:
    """Return a site with its saved bytes; a site outside modules, such as the optimizer's state, stays the same."""
    if site.path not in after.calls:
        return site
    kept = [trace.bytes_at(site.path) if site.called else trace.bytes_under(site.path) for trace in (before, after)]
    read = {"bytes_before": kept[0], "bytes_after": kept[1]}
    calls = after.calls[site.path] or None  # None for a model of which only parts are called
    return site.model_copy(update={**read, "calls": calls})


def _why_idle(site: Site, after: Trace) -> str:
    if after.calls.get(site.path):
        return "its code names them, and a training step calls none of them on a tensor that needs a gradient"
    parent = site.path.rpartition(".")[0]
    if after.calls.get(parent):
        return "never called in a training step (its weight is read by its parent)"
    return "never called in a training step"
