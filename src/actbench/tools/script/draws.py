"""Random numbers of the host's generator: those that a real run draws for tensors that have no values here.

Where the numbers of a tensor come one after the other, so do those of its pieces. Each piece is drawn and thrown away,
so that the generator gives the same numbers afterwards: the order of rows, and with it the lengths of padded batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

MOST = 2**29
"""Numbers that a script may draw for tensors without values: some seconds."""

_PIECE = 2**20
"""A multiple of the 16 elements that ``normal_`` computes together; the last piece has as many or more."""

_TOO_MANY = (
    f"In host memory the script draws over {MOST:,} random numbers, which are not drawn here: seeded numbers after "
    "them, such as the order of rows, are not those of a real run"
)

_FILLED: dict[Any, Any] = {
    **dict.fromkeys((aten.rand, aten.rand_like, aten.bernoulli, aten.randperm), aten.uniform_.default),
    **dict.fromkeys((aten.randn, aten.randn_like, aten.normal), aten.normal_.default),
    **dict.fromkeys((aten.randint, aten.randint_like), aten.random_.default),
}
"""What fills a tensor by as many numbers as an operator that makes one draws."""

_IN_FLOAT32 = (aten.bernoulli, aten.randperm)
"""Operators that draw as many bits as float32 needs for each element, whatever their result is."""


class HostDraws:
    """Draws from the host's generators what tensors without values would have drawn.

    Args:
        note: Told if these are too many.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note, self._left = note, MOST

    def draw(self, func: Any, args: Any, kwargs: Any, made: Tensor) -> None:
        """Draw the numbers of an operator of torch that made or filled a tensor in host memory."""
        packet, count = func.overloadpacket, made.numel() - (func.overloadpacket is aten.randperm)
        fill, others, named = func, args[1:], kwargs
        if packet in _FILLED or any(isinstance(each, Tensor) for each in others):
            fill, others = _FILLED.get(packet, aten.uniform_.default), ()
            named = {"generator": kwargs.get("generator")}
        elif not func._schema.is_mutable:
            return
        if packet in (aten.randint, aten.randint_like):
            fill, others = aten.random_.to, (2**32 if _is_wide(func, args) else 2,)
        if count > self._left:
            self._left = 0
            self._note(_TOO_MANY)
            return
        self._left -= count
        dtype = torch.float32 if packet in _IN_FLOAT32 else made.dtype
        apart = 1 if made.is_contiguous() else 2
        with _disable_current_modes(), torch.no_grad():
            if _is_of_one_seed(fill):
                count = min(count, 1)
            while count:
                size = count if count < 2 * _PIECE else _PIECE
                fill(torch.empty(size * apart, dtype=dtype)[::apart], *others, **named)
                count -= size


def _is_wide(func: Any, args: Any) -> bool:
    """Return whether integers come from a range that takes 64 bits of each."""
    bounds = [each for each in args if isinstance(each, int)]
    return bounds[-1] - (bounds[0] if len(bounds) > 1 else 0) >= 2**32


@functools.cache
def _is_of_one_seed(fill: Any) -> bool:
    """Return whether a filling operator draws one seed for a library, as MKL's do, however many its elements are."""
    if fill is not aten.exponential_.default and fill is not aten.bernoulli_.float:
        return False
    states = []
    for size in (1, 16):
        generator = torch.Generator().manual_seed(0)
        fill(torch.empty(size), generator=generator)
        states.append(generator.get_state())
    return torch.equal(*states)
