"""Follows which module of a model runs, in the forward pass and in the backward pass of the nodes that it made."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from actbench.results.ledger import OUTSIDE

Around = Callable[[str], Callable[[], object]]
"""Called with the path of a module that begins to run; returns a function to call when the module ends."""


def _nothing(path: str) -> Callable[[], None]:
    return lambda: None


class RunningModules:
    """Follows which module runs, by hooks on all modules.

    Attributes:
        calls: How often each module ran so far, by path.
    """

    def __init__(self, module: nn.Module, around: Around = _nothing) -> None:
        self.calls = {path: 0 for path, _ in module.named_modules()}
        self._module = module
        self._around = around
        self._active: list[tuple[str, Callable[[], object]]] = []
        # autograd counts nodes per thread; recomputation in the backward pass on a GPU runs in another thread
        self._turns: defaultdict[int, list[tuple[int, str]]] = defaultdict(lambda: [(0, OUTSIDE)])
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow modules inside the block, whose thread runs forward passes; remove the hooks at the end."""
        self._thread = threading.get_ident()
        with ExitStack() as handles:
            for path, child in self._module.named_modules():
                enter = child.register_forward_pre_hook(partial(self._enter, path), prepend=True)
                handles.callback(enter.remove)
                leave = child.register_forward_hook(self._leave, always_call=True)
                handles.callback(leave.remove)
            yield

    @property
    def running(self) -> str:
        """The path of the module whose forward pass runs; :data:`~actbench.results.ledger.OUTSIDE` if none runs."""
        return self._active[-1][0] if self._active else OUTSIDE

    def made_node(self, sequence_number: int) -> str:
        """Return the path of the module whose forward pass made a node of autograd's graph, in its thread."""
        turns = self._turns[self._thread]
        return turns[bisect_right(turns, sequence_number, key=lambda turn: turn[0]) - 1][1]

    def _enter(self, path: str, *_: Any) -> None:
        self._active.append((path, self._around(path)))
        self._note_turn()
        self.calls[path] += 1

    def _leave(self, *_: Any) -> None:
        self._active.pop()[1]()
        self._note_turn()

    def _note_turn(self) -> None:
        self._turns[threading.get_ident()].append((torch._C._autograd._get_sequence_nr(), self.running))
