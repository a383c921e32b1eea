"""What a block that runs twice finds in its second run: its buffers as they were before the first, and fresh seeds.

A second run with the buffers that the first has left would compute something else (spectral norm's vectors, a running
mean), and count a batch twice. It is therefore given copies of what the buffers were, and the buffers themselves stand
again where they stood when it is over: other graphs find them unchanged, version and all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from actbench.nn.statistics import STATISTICS, counting_norms, statistics_kept
from actbench.ops import seeds
from actbench.units import KIB

_SMALL_BYTES = 64 * KIB
"""Up to here a copy of a buffer is held whether or not the run was seen to write it: counters, means, vectors."""

_ABSENT = object()
"""Stands for a buffer that is not registered."""


@dataclass
class Written:
    """What is known of which buffers a block writes.

    Attributes:
        names: Path in the block, and name, of those that a run was seen to write or to replace.
        is_known: Whether a run's buffers were compared with those before it.
    """

    names: set[tuple[str, str]] = field(default_factory=set)
    is_known: bool = False


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer before a run.

    Attributes:
        path: Of the module in the block.
        part: The module.
        name: Of the buffer in it.
        value: What stood there.
        version: Its version; None where it has none.
        copy: Of its values; None where it cannot be copied, or there is nothing to copy.
    """

    path: str
    part: nn.Module
    name: str
    value: Tensor | None
    version: int | None
    copy: Tensor | None

    def is_replaced(self) -> bool:
        """Return whether another tensor stands there now."""
        return self.part._buffers.get(self.name, _ABSENT) is not self.value

    def is_written(self, by_value: bool) -> bool:
        """Return whether it was written in place. By its version alone what writes past autograd is not seen."""
        if self.value is None or self.copy is None:
            return False
        if _version(self.value) != self.version:
            return True
        return by_value and _has_values(self.value) and not torch.equal(self.value, self.copy)


class Rerun:
    """The further runs of a block, each of which is to do what its first did; enter this around each of them.

    All buffers are copied before the first run. After it those copies are dropped that are large and of buffers that
    no run was seen to write: by version, and by values after the block's first run of all (on a CPU after each). So a
    run costs the bytes of the block's buffers while it lasts, and those that it writes, and the small ones, until its
    graph is gone. A large buffer that is written past autograd on a device (through ``.data``) for the first time in a
    later run than the block's first is not noticed. Nor is state that is no buffer.

    Args:
        module: The block, before its first run.
        written: What is known of its buffers; learns from the run.
    """

    def __init__(self, module: nn.Module, written: Written) -> None:
        self._module, self._written = module, written
        self._norms = counting_norms(module)
        copies: dict[Tensor, Tensor] = {}
        self._before = [_as_it_is(*place, copies) for place in _places(module, self._norms)]
        self._held: list[tuple[nn.Module, str, Any]] = []
        self._runs = 0
        self._open: list[ExitStack] = []

    def ran(self) -> None:
        """Say that the first run is over: hold what the others need of the buffers before it."""
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
        """Give the block its buffers of before; return those tensors."""
        with ExitStack() as stack:
            stack.enter_context(statistics_kept(self._norms))
            given = stack.enter_context(self._given())
            # A graph that is kept may ask for this again, and torch restores the generator of the first run each time.
            seeds.diverge(torch.default_generator, self._runs)
            self._runs += 1
            self._open.append(stack.pop_all())
        return given

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    @contextmanager
    def _given(self) -> Iterator[list[Tensor]]:
        now = [(part, name, part._buffers.get(name, _ABSENT)) for part, name, _ in self._held]
        copies: dict[Tensor, Tensor] = {}
        for part, name, before in self._held:
            if isinstance(before, Tensor) and _may_be_copied(before):
                if before not in copies:
                    copies[before] = before.clone()
                before = copies[before]
            _put(part, name, before)
        try:
            yield list(copies.values())
        finally:
            for part, name, value in now:
                _put(part, name, value)


def writes_buffers(module: nn.Module, written: Written) -> bool:
    """Return whether a block writes buffers other than the statistics of norms, or may do so for all that is known."""
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
    if value is None or not _may_be_copied(value):
        return _Buffer(path, part, name, value, None, None)
    if value not in copies:
        copies[value] = value.clone()
    return _Buffer(path, part, name, value, _version(value), copies[value])


def _may_be_copied(buffer: Tensor) -> bool:
    return not buffer.requires_grad and not is_lazy(buffer)


def _version(buffer: Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version


def _has_values(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and not buffer.is_meta  # a fake one is of another type


def _put(part: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        part._buffers.pop(name, None)
    elif part._buffers.get(name, _ABSENT) is not value:
        part._buffers[name] = value
