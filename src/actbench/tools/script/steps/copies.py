"""Finds storages that are copies of weights: the averages that a script keeps by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch import Tensor

from actbench.simulator.cachingmode import tensors_of

Names = Callable[[Iterable[Tensor]], set[int]]
"""Returns the names of the storages of tensors, as far as these are counted."""


class Copies:
    """Notes of each storage from which others of its shape it was made; numbers do not count.

    A copy, and what follows from it and from copies alone, such as the next average, is made of weights.

    Attributes:
        apart: Those that were made without gradients: nothing saves them for a backward pass.
    """

    def __init__(self) -> None:
        self._sources: dict[int, Set[int]] = {}
        self.apart: set[int] = set()
        self._running: Set[int] = frozenset()

    def follow(self, given: Any, result: Any, names: Names) -> None:
        """Note the arguments of the operator that has just run; :meth:`made` is told what it made."""
        self._running = frozenset()
        if isinstance(result, Tensor):
            tensors = [tensor for tensor in tensors_of(given) if tensor.numel() > 1]
            if tensors and all(tensor.shape == result.shape for tensor in tensors):
                self._running = names(tensors)

    def made(self, name: int) -> None:
        """Note that this operator made a storage."""
        if self._running:
            self._sources[name] = self._running
            if not torch.is_grad_enabled():
                self.apart.add(name)

    def of(self, weights: Set[int]) -> set[int]:
        """Return the names of storages that are made of these alone."""
        found = set(weights)
        for name, sources in self._sources.items():  # what is made is younger than what it is made of
            if sources <= found:
                found.add(name)
        return found - weights
