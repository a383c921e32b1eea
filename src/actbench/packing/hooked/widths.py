"""Bits of an element by the layer that saves it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import nn

from actbench.packing.forwardwrapper import ReboundForward

_bits: ContextVar[int | None] = ContextVar("_bits", default=None)


def bits_here() -> int | None:
    """Return the bits of what the running layer saves, or None where no layer has bits of its own."""
    return _bits.get()


class WidthForward(ReboundForward):
    """A forward whose saved tensors have bits of their own; layers inside with bits of theirs come first."""

    def __init__(self, module: nn.Module, bits: int) -> None:
        super().__init__(module)
        self.bits = bits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        token = _bits.set(self.bits)
        try:
            return self.inner(self.module, *args, **kwargs)
        finally:
            _bits.reset(token)
