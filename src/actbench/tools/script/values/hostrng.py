"""Advances the host's random generator by what a real run draws for tensors that have no values here.

Where the numbers of a tensor come one after the other, so do those of its pieces. Each piece is drawn and thrown away,
so that the generator gives the same numbers afterwards: the order of rows, and with it the lengths of padded batches.
What a large draw makes of a generator is remembered for the other processes in which the same script runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

MOST = 2**29
"""Numbers that a script may draw for tensors without values: some seconds."""

_PIECE = 2**20
"""A multiple of the 16 elements that ``normal_`` computes together; the last piece has as many or more.

Smaller draws take less time than a look for them takes.
"""

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


class GeneratorStates:
    """The states of generators after large draws, known to this process and to all that are forked from it.

    A draw is known by the state before it and by what is drawn. Each process adds records of one length to the end of
    one file without a name.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as this process and its forks
        weakref.finalize(self, self._file.close)
        self._known: dict[bytes, bytes] = {}
        self._read_bytes = 0

    def after(self, generator: torch.Generator, draw: Callable[[], object], what: str) -> None:
        """Bring a generator to the state in which a draw leaves it; ``what`` names all that the draw depends on."""
        state = generator.get_state().numpy().tobytes()
        key = hashlib.sha256(state + what.encode()).digest()
        length = len(key) + len(state)
        while len(record := os.pread(self._file.fileno(), length, self._read_bytes)) == length:
            self._known[record[: len(key)]] = record[len(key) :]
            self._read_bytes += length
        if key in self._known:
            generator.set_state(torch.frombuffer(bytearray(self._known[key]), dtype=torch.uint8))
            return
        draw()
        with suppress(OSError):  # no space: others draw, too
            os.write(self._file.fileno(), key + generator.get_state().numpy().tobytes())


class HostRng:
    """Draws from the host's generators what tensors without values would have drawn.

    Args:
        note: Told if these are too many.
        states: What other processes have drawn; None where there are none.
    """

    def __init__(self, note: Callable[[str], object], states: GeneratorStates | None = None) -> None:
        self._note, self._left, self._states = note, MOST, states

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

        def draw() -> None:
            left = min(count, 1) if _is_of_one_seed(fill) else count
            while left:
                size = left if left < 2 * _PIECE else _PIECE
                fill(torch.empty(size * apart, dtype=dtype)[::apart], *others, **named)
                left -= size

        generator = named.get("generator") or torch.default_generator
        with _disable_current_modes(), torch.no_grad():
            if self._states is None or count < _PIECE or type(generator) is not torch._C.Generator:
                draw()
            else:
                self._states.after(generator, draw, f"{fill} {others} {dtype} {apart} {count}")


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
