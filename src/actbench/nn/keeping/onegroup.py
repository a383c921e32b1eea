"""The form of a tensor whose elements all share two bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.nn.keeping.forms import Grouped, Kept, Parts, laid_out, order_of
from actbench.ops import onegroup
from actbench.ops.seeds import fresh_seed


@dataclass(frozen=True)
class OneGroup(Grouped):
    """Codes of one width in one group, in the order of the tensor's memory; parts are codes and meta."""

    @property
    def bits(self) -> float:
        """Bits of a code."""
        return self.width

    def _decoded(self, parts: Parts, start: int, shape: torch.Size) -> Tensor:
        codes, meta = parts
        width = codes.numel() * 8 // self.shape.numel()  # which may be a recomputation's, after the bits had changed
        flat = onegroup.decode(codes, meta, width, start, shape.numel(), self.dtype)
        return laid_out(flat, shape, self.order)


def in_one_group(x: Tensor, flat: Tensor, width: int, stochastic: bool) -> Kept:
    """Return a tensor as it is kept in one group.

    Args:
        x: Any shape and strides.
        flat: Its elements in the order of its memory.
        width: Bits per code, 1 to 8.
        stochastic: Whether rounding is.
    """
    codes, meta = onegroup.encode(flat, width, fresh_seed(), stochastic)
    return Kept(OneGroup(x.shape, x.dtype, order_of(x), width, flat.numel()), (codes, meta))
