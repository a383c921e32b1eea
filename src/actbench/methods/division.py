"""DIVISION: means of blocks as they are, and differences to them in few bits (Wang et al., arXiv 2208.04187)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from actbench.methods.actnn.groupquantization import groups_of
from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.packedinputs import with_packed_inputs
from actbench.model.gradient import Gradient
from actbench.packing import Codec, Parts, SiteState
from actbench.packing.layout import Layout, in_order
from actbench.packing.replacement import is_conv1d
from actbench.scheme.base import LINEAR_LAYERS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup

LARGEST_GROUP = 1024


@dataclass(eq=False)
class OfPictures(SiteState):
    """The site of a layer whose input has the dimensions of a picture or a signal from the third on."""


@dataclass(frozen=True)
class TwoFrequencies(Codec):
    """Means of blocks, in the tensor's type, and each element's difference to the mean of its block, in few bits.

    Attributes:
        block: Elements of a block along each averaged dimension; the last block may have fewer.
        width: Bits of a code.
    """

    block: int
    width: int

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return the format of a tensor: averaged over a picture, over tokens, or over features if it has no tokens."""
        if x.dtype == torch.bool:
            return super().at(x, site)
        last = x.dim() - 1
        axes = tuple(range(max(2, last - 1), last + 1)) if isinstance(site, OfPictures) else (last - 1,)
        if x.dim() < 3:
            axes = (last,)
        row = x.shape[axes[0] :].numel() if isinstance(site, OfPictures) else x.shape[-1]
        return Divided(self.block, self.width, Layout.of(x), axes, groups_of(x, self.width, row, LARGEST_GROUP))


@dataclass(frozen=True)
class Divided(TwoFrequencies):
    """The format of one tensor; parts are the means, and the codes and words of the groups of differences.

    Attributes:
        first: The layout that is cut into blocks; another site may have another view of the same memory.
        axes: The dimensions that are averaged over.
        groups: How the differences are coded.
    """

    first: Layout
    axes: tuple[int, ...]
    groups: Groups

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return the means, uint8 codes and int32 words."""
        x = layout.laid_out(flat)
        means = reduce(partial(_averaged, block=self.block), self.axes, x)
        differences = in_order(x - self._spread(means), None if layout.order is None else list(layout.order))
        return means, *self.groups.encode(differences.view(-1), layout)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return means and decoded differences, added."""
        flat = self.groups.decode(parts[1:], self.first, 0, self.first.elements)
        self.first.laid_out(flat).add_(self._spread(parts[0]))
        return layout.laid_out(flat)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of a mean for each block, and those of the groups."""
        shape = list(self.first.shape)
        for axis in self.axes:
            shape[axis] = -(-shape[axis] // self.block)
        return torch.Size(shape).numel() * layout.dtype.itemsize + self.groups.packed_bytes(self.first)

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return why values of a group became NaN, or None."""
        return self.groups.lost(flat, parts[1:])

    def _spread(self, means: Tensor) -> Tensor:
        """Return the mean of each element's block."""
        for axis in self.axes:
            means = means.repeat_interleave(self.block, axis).narrow(axis, 0, self.first.shape[axis])
        return means


def _averaged(x: Tensor, axis: int, block: int) -> Tensor:
    """Return means over blocks of a dimension; the last block may be shorter."""
    whole, rest = divmod(x.shape[axis], block)
    end = x.narrow(axis, whole * block, rest).mean(axis, keepdim=True) if rest else None
    if not whole:
        assert end is not None
        return end
    means = x.unfold(axis, block, block).mean(-1)
    return means if end is None else torch.cat([means, end], axis)


class Division(Scheme):
    """Layers save the means of blocks of their input, and the elements' differences to these in 2 bits.

    Paper: Wang et al., "DIVISION: Memory Efficient Training via Dual Activation Precision", arXiv 2208.04187.
    Kept for backward: for the input of a convolution or a norm of pictures, a mean for each block of 8 x 8, in the type
    of the input; for the input of a linear layer or layer norm, a mean for each 8 tokens (for each 8 features if it has
    two dimensions). The differences are codes of ``bits``, with an offset and a maximum, 32 bits together, for each
    channel of a sample or each token, of at most 1,024 elements. ReLU, dropout and pools save an exact small code.
    The forward pass is exact, and so are the gradients of inputs, except those of norms. Rounding is stochastic: the
    gradient of a weight has no bias; the gradient of a norm's input has the small bias of ``actnn``.
    Not reproduced: one offset and scale for a channel of the whole batch.

    Attributes:
        block: Elements of a block along each dimension.
        bits: Bits of a code, 1 to 8.
    """

    name: ClassVar[str] = "division"
    positional: ClassVar[str | None] = "block"
    card: ClassVar[Card] = Card(
        summary="layers save the means of blocks of their input, and the differences from these in 2 bits",
        paper="Wang et al. 2022, arXiv 2208.04187",
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)
    gradient: ClassVar[Gradient] = "unbiased"  # but for the small bias of norms

    block: Annotated[int, Field(ge=2, le=1024)] = 8
    bits: Annotated[int, Field(ge=1, le=8)] = 2

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace layers by ones that pack their input; see :func:`with_packed_inputs` for what is raised."""

        def state_of(layer: nn.Module, path: str) -> SiteState:
            of_tokens = isinstance(layer, nn.LayerNorm | nn.Linear) or is_conv1d(type(layer))
            return (SiteState if of_tokens else OfPictures)(setup.path_of(path), self.bits)

        codec = TwoFrequencies(self.block, self.bits)
        return with_packed_inputs(self, setup, codec, state_of, f"input, {self.bits} bits and means")
