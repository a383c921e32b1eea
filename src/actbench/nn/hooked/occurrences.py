"""Telling the saved tensors of a step apart, so that each finds the bits again that it was given in an earlier step.

A saved tensor is known by the operator that made it, by its shape without the batch, and by how many such tensors the
step has saved before it. The order among tensors of different kinds does not matter, so that a branch which runs in
some steps only moves nothing but its own kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from actbench.nn.keeping import Place

Kind = tuple[str, str, tuple[int, ...]]
"""The recomputed block a tensor is saved in (or nothing), the operator that made it, its shape without the batch."""


class Occurrences:
    """The places of a model's saved tensors, made as they are first seen.

    Args:
        bits: What a new place is given.
    """

    def __init__(self, bits: float) -> None:
        self.bits = bits
        self._places: dict[Kind, list[Place]] = {}
        self._seen: Counter[Kind] = Counter()
        self._block = ""

    def begin(self) -> None:
        """Say that a forward pass begins."""
        self._seen.clear()

    @contextmanager
    def block(self, path: str) -> Iterator[None]:
        """Say that what is saved inside of the with-block belongs to one run of a block that is recomputed."""
        for kind in [kind for kind in self._seen if kind[0] == path]:
            del self._seen[kind]
        outer, self._block = self._block, path
        try:
            yield
        finally:
            self._block = outer

    def place(self, tensor: Tensor) -> Place:
        """Return the place of a tensor that is being saved."""
        kind = (self._block, "output" if tensor.grad_fn is None else tensor.grad_fn.name(), tuple(tensor.shape[1:]))
        places = self._places.setdefault(kind, [])
        index = self._seen[kind]
        self._seen[kind] += 1
        if index == len(places):
            places.append(Place(_name(kind, index), self.bits))
        return places[index]

    def seen(self) -> dict[Kind, list[Place]]:
        """Return the places of the last forward pass, by kind, in order of time."""
        return {kind: self._places[kind][:count] for kind, count in self._seen.items()}

    def adapted(self) -> Any:
        """Return the bits of all places; see :class:`actbench.nn.adapted.Adapted`."""
        return [(kind, [place.bits for place in places]) for kind, places in self._places.items()]

    def adapt(self, state: Any) -> None:
        """Go on from what :meth:`adapted` returned."""
        for (block, maker, shape), widths in state:
            kind = (block, maker, tuple(shape))
            self._places[kind] = [Place(_name(kind, index), bits) for index, bits in enumerate(widths)]

    def __iter__(self) -> Iterator[Place]:
        for places in self._places.values():
            yield from places


def _name(kind: Kind, index: int) -> str:
    block, maker, shape = kind
    return f"{block} {maker} {list(shape)} #{index}".lstrip()
