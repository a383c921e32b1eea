"""The number format: what it stores, in how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.ops.bitpack import pack_codes, packed_bytes, unpack_codes
from actbench.ops.noise import fresh_seed
from actbench.ops.rounding import stochastic
from actbench.packing import Codec, Layout, Parts, SiteState

BLOCK = 128
"""Elements that share a least value and a step."""


@dataclass(frozen=True)
class Integers(Codec):
    """Each block as integers of 1 to 8 ``bits`` between its least and its largest value, rounded up or down by chance.

    The mean of a decoded element over the random numbers is the element. Parts are the integers, uint8
    ``(ceil(bits elements / 8),)``, and the least value and the step of each block, float32 ``(2, blocks)``.
    """

    bits: int

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the parts of the elements, a vector in memory order."""
        blocks = _blocks(flat.float())
        least, largest = blocks.aminmax(dim=1, keepdim=True)
        step = (largest - least) / self._most
        places = (blocks - least) / step.where(step > 0, 1.0)
        whole = stochastic(places, fresh_seed(flat)).clamp_(0, self._most).to(torch.uint8)
        return pack_codes(whole.flatten()[: layout.elements], self.bits), torch.cat([least, step], 1).T.contiguous()

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        whole, (least, step) = unpack_codes(parts[0], self.bits, layout.elements), parts[1]
        decoded = _blocks(whole.float()) * step[:, None] + least[:, None]
        return layout.laid_out(decoded.flatten()[: layout.elements].to(layout.dtype))

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the integers, and 8 for each block."""
        return packed_bytes(layout.elements, self.bits) + 8 * -(-layout.elements // BLOCK)

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Say that a value which is not finite would spoil its block; the tensor then stays whole."""
        return None if bool(parts[1].isfinite().all()) else "values that are not finite"

    @property
    def _most(self) -> int:
        return 2**self.bits - 1


def _blocks(flat: Tensor) -> Tensor:
    """Return a vector in rows of a block; the last element fills up the last row."""
    missing = -len(flat) % BLOCK
    return torch.cat([flat, flat[-1:].expand(missing)]).view(-1, BLOCK)
