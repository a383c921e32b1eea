"""Prepares the second run of a block: parameters, buffers and caches as before the first run, and fresh seeds.

A second run on the buffers that the first run left would compute something else (spectral norm, a running mean), and
count a batch twice. It gets copies of the earlier buffers, and afterwards the buffers themselves are back in place:
other graphs find them unchanged, with the same version. Caches of keys and values are those of transformers, checked by
name so that transformers need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase

from actbench.methods.checkpointing.firsttensors import FirstTensors
from actbench.packing.copies import copy_of, may_be_copied
from actbench.units import KIB

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""The buffers of norms that :func:`statistics_kept` protects."""


def counting_norms(module: nn.Module) -> list[_NormBase]:
    """Return the norms inside a module that update running statistics but do not read them in training.

    These are torch's own norms, and those whose class says so by ``only_updates_statistics``: another subclass may read
    them, as batch renormalisation does.
    """
    return [
        norm
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.track_running_stats and _only_updates_statistics(type(norm))
    ]


def _only_updates_statistics(kind: type[_NormBase]) -> bool:
    return kind.__module__.startswith("torch.nn.modules.") or getattr(kind, "only_updates_statistics", False)


@contextmanager
def statistics_kept(norms: list[_NormBase]) -> Iterator[None]:
    """Leave running statistics unchanged: another run counts this batch.

    A momentum of 0 does so without a change of what the layer saves, which must be the same in both runs. The count
    goes to a tensor that is thrown away, since SyncBatchNorm needs one.
    """
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, counted in before:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None if counted is None else counted.clone()
    try:
        yield
    finally:
        for norm, momentum, counted in before:
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, counted


_SMALL_BYTES = 64 * KIB
"""A copy of a buffer up to this size is held even if no run was seen to write it: counters, means, vectors."""

_ABSENT = object()
"""Marks a buffer that is not registered."""


@dataclass
class Written:
    """Path and name of the buffers that a run was seen to write or replace, and whether any run was checked."""

    names: set[tuple[str, str]] = field(default_factory=set)
    is_known: bool = False


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer before a run; its version and copy are None where it has none, or cannot be copied."""

    path: str
    part: nn.Module
    name: str
    value: Tensor | None
    version: int | None
    copy: Tensor | None

    def is_replaced(self) -> bool:
        """Return whether another tensor is registered there now."""
        return self.part._buffers.get(self.name, _ABSENT) is not self.value

    def is_written(self, by_value: bool) -> bool:
        """Return whether the buffer was written in place. Its version alone does not show writes past autograd."""
        if self.value is None or self.copy is None:
            return False
        if _version(self.value) != self.version:
            return True
        has_values = type(self.value) is Tensor and not self.value.is_meta  # a fake tensor has another type
        return by_value and has_values and not torch.equal(self.value, self.copy)


_Around = Callable[[], AbstractContextManager[Any]]


class Rerun:
    """The further runs of a block, which must repeat its first run; enter this around each of them.

    All buffers are copied before the first run. After it, large copies are dropped if no run was seen to write their
    buffer: by version, and by values after the block's very first run (on a CPU after each run). So a run takes the
    bytes of the block's buffers while it lasts, and those of written and of small buffers until its graph is freed. If
    a later run is the first to write a large buffer past autograd on a device (through ``.data``), this is not noticed;
    nor is a change of state that is no buffer. ``around`` returns a further context for each of these runs.
    """

    # after a graph break torch.compile would trace this, and take weak references for what they refer to
    @_disable_dynamo  # torch.compiler.disable would import torch's compiler, which takes seconds, with this module
    def __init__(self, module: nn.Module, written: Written, around: _Around = nullcontext) -> None:
        self._module, self._written, self._around = module, written, around
        self._norms, self._tensors = counting_norms(module), FirstTensors(module)
        copies: dict[Tensor, Tensor] = {}
        self._before = [_as_it_is(*place, copies) for place in _places(module, self._norms)]
        self._held: list[tuple[nn.Module, str, Any]] = []
        self._open: list[ExitStack] = []

    def ran(self) -> None:
        """End the first run: hold what further runs need of the earlier buffers."""
        first, self._written.is_known = not self._written.is_known, True
        known = {(buffer.part, buffer.name) for buffer in self._before}
        for path, part, name in _places(self._module, self._norms):
            if (part, name) not in known:
                self._written.names.add((path, name))
                self._held.append((part, name, _ABSENT))
        for buffer in self._before:
            self._settle(buffer, first)
        self._before = []

    def _settle(self, buffer: _Buffer, first: bool) -> None:
        key, is_large = (buffer.path, buffer.name), buffer.copy is not None and buffer.copy.nbytes > _SMALL_BYTES
        on_cpu = buffer.value is not None and buffer.value.device.type == "cpu"
        if buffer.is_replaced() or buffer.is_written(by_value=first or (is_large and on_cpu)):
            self._written.names.add(key)
        if buffer.copy is not None and (key in self._written.names or not is_large):
            self._held.append((buffer.part, buffer.name, buffer.copy))
        elif buffer.copy is None and buffer.is_replaced():
            self._held.append((buffer.part, buffer.name, buffer.value))

    def __enter__(self) -> list[Tensor]:
        """Give the block its earlier parameters and buffers; return these buffers."""
        with ExitStack() as stack:
            stack.enter_context(self._tensors.given())
            stack.enter_context(statistics_kept(self._norms))
            given = stack.enter_context(self._given())
            stack.enter_context(self._around())
            self._open.append(stack.pop_all())
        return given

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    @contextmanager
    def _given(self) -> Iterator[list[Tensor]]:
        now = [(part, name, part._buffers.get(name, _ABSENT)) for part, name, _ in self._held]
        copies: dict[Tensor, Tensor] = {}
        for part, name, before in self._held:
            is_copied = isinstance(before, Tensor) and may_be_copied(before)
            _put(part, name, copy_of(before, copies) if is_copied else before)
        try:
            yield list(copies.values())
        finally:
            for part, name, value in now:
                _put(part, name, value)


def writes_buffers(module: nn.Module, written: Written) -> bool:
    """Return whether a block writes, or may write, buffers other than the statistics of norms."""
    if written.is_known:
        return bool(written.names)
    return bool(_places(module, counting_norms(module)))


def _places(module: nn.Module, norms: list[_NormBase]) -> list[tuple[str, nn.Module, str]]:
    """Return path, module and name of each buffer but the statistics of these norms."""
    counted = set(norms)
    return [
        (path, part, name)
        for path, part in module.named_modules()
        for name in part._buffers
        if not (part in counted and name in STATISTICS)
    ]


def _as_it_is(path: str, part: nn.Module, name: str, copies: dict[Tensor, Tensor]) -> _Buffer:
    value = part._buffers[name]
    if value is None or not may_be_copied(value):
        return _Buffer(path, part, name, value, None, None)
    return _Buffer(path, part, name, value, _version(value), copy_of(value, copies))


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version


def _put(part: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        part._buffers.pop(name, None)
    elif part._buffers.get(name, _ABSENT) is not value:
        part._buffers[name] = value
