"""What the operators of a step do, in order, noted while they run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actbench.measuring.cost.work import Work, idle, idle_work, work_of
from actbench.ops import hostmemory
from actbench.results.records import Phase

_PLAIN = (int, bool, float, type(None), torch.dtype)


class Done(NamedTuple):
    """An operator of a step: the part of the step that ran it, and whether the host computed it."""

    phase: Phase
    work: Work
    on_host: bool


class Recorder:
    """Notes what each operator does; one that ran with the same shapes and types before is not looked at again.

    Args:
        phase: Tells which part of the step runs.

    Attributes:
        done: The operators of the step.
        is_on: Whether operators are noted.
    """

    def __init__(self, phase: Callable[[], Phase | None]) -> None:
        self._phase = phase
        self._known: dict[Any, Work | None] = {}
        self._idle: dict[Any, bool] = {}
        self.done: list[Done] = []
        self.is_on = False

    def begin(self) -> None:
        """Forget what was noted: the step that counts begins."""
        self.done.clear()
        self.is_on = True

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an operator that has run."""
        if not self.is_on:
            return
        if func not in self._idle:
            self._idle[func] = idle(func)
        key: Any = func if self._idle[func] else (func, *map(_key, args), *map(_key, kwargs.values()))
        if key not in self._known:
            self._known[key] = idle_work(func) if key is func else work_of(func, args, kwargs, result)
        work = self._known[key]
        if work is not None:
            self.done.append(Done(self._phase() or "forward", work, hostmemory.is_running()))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value if isinstance(value, _PLAIN) else None
