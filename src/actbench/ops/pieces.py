"""Loops over the pieces of a tensor, of which a simulation runs one.

All pieces but the last have one size, so the first alone sets the peak of memory. Fake operators take as long as small
real ones, and a model of billions of numbers has tens of thousands of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Piece = TypeVar("Piece")
Repeat = Callable[[int], AbstractContextManager[None]]
"""From a number of times to a context, inside which what is done counts as often."""

_repeat: ContextVar[Repeat] = ContextVar("_repeat", default=lambda times: nullcontext())


@contextmanager
def repeated_by(repeat: Repeat) -> Iterator[None]:
    """Inside, tell ``repeat`` how many pieces the one that runs stands for."""
    token = _repeat.set(repeat)
    try:
        yield
    finally:
        _repeat.reset(token)


def one_for_all(pieces: Sequence[Piece], of: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a tensor; of a fake one only the first, which stands for all."""
    if not isinstance(of, FakeTensor):
        yield from pieces
    elif pieces:
        with _repeat.get()(len(pieces)):
            yield pieces[0]
