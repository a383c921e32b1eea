"""What the operators of a step do, in order, noted while they run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actbench.model.records import Phase
from actbench.simulator.cachingmode import tensors_of
from actbench.simulator.cost.collectives import collective_of, is_collective
from actbench.simulator.cost.queues import IN_ORDER, Queues, Turn
from actbench.simulator.cost.work import OperatorWork, exchange, idle, idle_work, work_of, written
from actbench.simulator.places import is_on_card

_PLAIN = (int, bool, float, type(None), torch.dtype)
_WAITS = ("wait_tensor", "wait_tensors")


class Done(NamedTuple):
    """An operator of a step: the part of the step that ran it, whether the host computes it, and when it may run."""

    phase: Phase
    work: OperatorWork
    on_host: bool
    turn: Turn = IN_ORDER


class Recorder:
    """Notes what each operator does; one that ran with the same shapes and types before is not looked at again.

    Args:
        phase: Tells which part of the step runs.
        all_operators: Whether others than collectives are noted, too.

    Attributes:
        done: The operators of the step.
        is_on: Whether operators are noted.
    """

    def __init__(self, phase: Callable[[], Phase | None], *, all_operators: bool = True) -> None:
        self._phase = phase
        self._all = all_operators
        self._known: dict[Any, OperatorWork | None] = {}
        self._idle: dict[Any, bool] = {}
        self._queues = Queues()
        self.done: list[Done] = []
        self.is_on = False

    def begin(self) -> None:
        """Forget what was noted: the step that counts begins."""
        self.done.clear()
        self._queues.clear()
        self.is_on = True

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note an operator that has run."""
        if not self.is_on:
            return
        phase = self._phase() or "forward"
        if func.namespace in _NAMESPACES and is_collective(func):
            self._exchange(phase, func, args, kwargs, result)
        elif self._all:
            work = self._work(func, args, kwargs, result)
            if work is not None:
                turn = self._turn(phase, work, func, args, kwargs, result)
                # the result alone is asked first: it mostly is on the card
                seen = is_on_card(result) or any(map(is_on_card, tensors_of((result, args, tuple(kwargs.values())))))
                self.done.append(Done(phase, work, not seen, turn))

    @contextmanager
    def repeating(self, times: int) -> Iterator[None]:
        """Note what runs inside the block ``times`` times, which may be 0."""
        first = len(self.done)
        yield
        if times:
            self.repeat(first, len(self.done), times - 1)
        else:
            del self.done[first:]

    def repeat(self, first: int, last: int, times: int) -> None:
        """Insert copies of some operators behind them, as if they had run again."""
        self.done[last:last] = self.done[first:last] * times

    def _exchange(self, phase: Phase, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        found = collective_of(func, args, kwargs, result)
        used = tensors_of((args, tuple(kwargs.values()), result))
        turn = self._queues.collective(found, used, phase, is_waited_for=func.namespace == "_c10d_functional")
        self.done.append(Done(phase, exchange(found), False, turn))

    def _work(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OperatorWork | None:
        if func not in self._idle:
            self._idle[func] = idle(func)
        key: Any = func if self._idle[func] else (func, *map(_key, args), *map(_key, kwargs.values()))
        if func in _COPIES:
            key += tuple(map(is_on_card, (*args[:2], result)))
        if key not in self._known:
            self._known[key] = idle_work(func) if key is func else work_of(func, args, kwargs, result)
        return self._known[key]

    def _turn(
        self, phase: Phase, work: OperatorWork, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Turn:
        """Return when an operator runs; a view waits for nothing."""
        if not self._queues.concern(work.name) or (work.kind is None and work.name not in _WAITS):
            return IN_ORDER
        made = tensors_of(result) or written(func, args)
        return self._queues.other(work.name, tensors_of((args, tuple(kwargs.values()))), made, phase)


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operators that may be a copy between host memory and a card."""

_NAMESPACES = ("c10d", "_c10d_functional")


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value if isinstance(value, _PLAIN) else None
