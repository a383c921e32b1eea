"""Mesa: saved tensors in 8 bits, with ranges by head or channel that are averaged over steps (arXiv 2111.11124)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.methods.actnn.groups import NOT_FINITE
from actbench.methods.actnn.layers.layers import small_codes
from actbench.model.provenance import Published
from actbench.ops.noise import fresh_seed
from actbench.ops.rounding import stochastic
from actbench.ops.simulation import one_for_all
from actbench.packing import Codec, Parts, SavedTensors, SiteState
from actbench.packing.layout import Layout, memory_order
from actbench.scheme.base import SAVED_RESULTS, SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.packedsaved import with_packed_saved_tensors
from actbench.scheme.setup import TrainingSetup

_LARGEST = torch.finfo(torch.float32).max / 4
"""Above this a range, or a step in it, may overflow."""
_PIECE, _PIECES = 1 << 18, 16  # the fewest elements that are coded at once, as noise takes 30 bytes each; most pieces
_STEPS = 255


@dataclass(frozen=True)
class RunningRanges(Codec):
    """The settings of 8-bit codes with running ranges; chooses the groups of each tensor.

    Attributes:
        decay: The share of its earlier range that a group keeps in each step.
        groups: The most groups of a tensor.
    """

    decay: float
    groups: int

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        no = super().why_not(x)
        if no is None and x.dtype != torch.bool and self._grouped(x).packed_bytes(Layout.of(x)) >= x.nbytes:
            no = "so small that its ranges take more bytes than 8 bits save"
        return no

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return the groups of a tensor."""
        return super().at(x, site) if x.dtype == torch.bool else self._grouped(x)

    def _grouped(self, x: Tensor) -> Grouped:
        """Return groups of heads or channels (dimension 1 of four or more, else the last), in the order of memory."""
        order = memory_order(x) or range(x.dim())
        heads = _heads.get()
        if heads and x.dim() == 3 and x.shape[0] % heads == 0 and order[0] == 0:  # a batched product's (b h, n, d)
            return Grouped(self.decay, x.shape[0] // heads, self._count(heads))
        dim = 1 if x.dim() > 3 else x.dim() - 1
        outer = math.prod(x.shape[each] for each in order[: list(order).index(dim)])
        return Grouped(self.decay, outer, self._count(x.shape[dim]))

    def _count(self, length: int) -> int:
        return next(count for count in range(min(self.groups, length), 0, -1) if length % count == 0)


@dataclass(frozen=True)
class Grouped(Codec):
    """8-bit codes between two bounds for each group; the bounds are averages over the tensors that a site packed.

    The first tensor of a site sets the bounds. What lies outside of them later is clipped. The site keeps them, and
    every packed tensor has those of its step as a part.

    Attributes:
        decay: The share of its earlier bounds that a group keeps.
        outer: How often all groups follow each other in memory.
        count: Groups.
    """

    decay: float
    outer: int
    count: int

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return codes, (elements,) uint8, and the bounds, (2, groups) float32.

        Those of a group with a value that is not finite, or too large, are NaN, and so is what it decodes to.
        """
        view = flat.view(self.outer, self.count, -1)
        bounds = torch.stack((view.amin((0, 2)), view.amax((0, 2)))).float()
        if not isinstance(flat, FakeTensor):  # a simulation keeps no ranges at the site
            usable = (bounds.abs() <= _LARGEST).all(0)
            site.kept = self._moved(site.kept, bounds, usable)
            bounds = site.kept.where(usable, math.nan)  # where hooks no longer look at values, the group becomes NaN
        low, step = _affine(bounds)
        codes = torch.empty(view.shape, dtype=torch.uint8, device=flat.device)
        step = step.clamp(min=torch.finfo(step.dtype).tiny)
        for rows in self._pieces(view):  # without a name for places, which would outlive its piece
            codes[rows] = stochastic(((view[rows].float() - low) / step).clamp_(0, _STEPS), fresh_seed(view)).to(
                torch.uint8
            )
        return codes.view(-1), bounds

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        low, step = _affine(parts[1])
        values = parts[0].view(self.outer, self.count, -1).float().mul_(step).add_(low)
        return layout.laid_out(values.to(layout.dtype).view(-1))

    def packed_bytes(self, layout: Layout) -> int:
        """Return a byte an element, and 8 for each group."""
        return layout.elements + 8 * self.count

    def bits(self, layout: Layout) -> float:
        """Return 8."""
        return 8.0

    def lost(self, flat: Tensor, parts: Parts) -> str | None:
        """Return a reason if a value is not finite, or so large that a range may overflow, else None."""
        least, most = flat.aminmax()
        return None if torch.maximum(-least, most).item() <= _LARGEST else NOT_FINITE

    def _moved(self, kept: Tensor | None, bounds: Tensor, usable: Tensor) -> Tensor:
        """Return the average of earlier bounds and those of a tensor; where these are not usable the earlier ones."""
        if kept is None or kept.shape != bounds.shape:
            return bounds
        kept = kept.to(bounds.device)
        return torch.where(usable, torch.where(kept.isfinite(), kept.lerp(bounds, 1 - self.decay), bounds), kept)

    def _pieces(self, view: Tensor) -> Iterator[slice]:
        size = max(max(_PIECE, view.numel() // _PIECES) // view[0].numel(), 1)
        pieces = [slice(first, first + size) for first in range(0, self.outer, size)]
        return one_for_all(pieces, of=view)


def _affine(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower bound of each group and the distance of two codes, (groups, 1)."""
    return bounds[0, :, None], ((bounds[1] - bounds[0]) / _STEPS)[:, None]


_heads: ContextVar[int] = ContextVar("_heads", default=0)
"""The matrices of one sample in the batched product that runs: the heads of attention; 0 outside of products."""


def _under_heads(product: Callable[..., Tensor], *factors: Tensor, **others: Any) -> Tensor:
    token = _heads.set(factors[0].shape[1] if [factor.dim() for factor in factors] == [4, 4] else 0)
    try:
        return product(*factors, **others)
    finally:
        _heads.reset(token)


class Rules(dict[Callable[..., Any], Callable[..., Any]]):
    """Rules for :class:`~actbench.packing.wrapped.Intercepted`; a copy or an unpickled one is made anew."""

    def __init__(self) -> None:
        products = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
        super().__init__(small_codes() | {each: partial(_under_heads, each) for each in products})

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Rules, ()


class Mesa(Scheme):
    """Saved-tensor hooks pack all saved tensors into 8 bits, with ranges per head that are averaged over steps.

    Paper: Pan et al., "Mesa: A Memory-saving Training Framework for Transformers", arXiv 2111.11124.
    Kept for backward: a byte per element, rounded stochastically, and two float32 bounds for each group of heads or
    channels; a bit per element for booleans, dropout's masks and ReLU. Bounds are running averages of the least and the
    largest value, with weight ``decay`` for the earlier bounds; the first batch sets them. They are not in a
    state_dict. A group is one head for tensors that attention's products save, one head or channel for tensors of four
    or more dimensions, and else a part of the features; ``groups`` limits the number of groups.
    Hooks pack what norms, softmax, GELU, linear layers, convolutions and products save; ``only=LayerNorm/*GELU*``
    limits this to kinds of layers. A tensor that several operators save is packed once.
    The forward pass is exact. Values inside of the bounds are unbiased; values outside are clipped, which is a bias.
    Not reproduced: kernels that pack in one pass; the authors' own rules of groups for features that are not heads.

    Attributes:
        decay: The weight of the earlier range in its average; 0 takes the range of each tensor, without clipping.
        groups: The most groups of a tensor. It has the largest divisor of its heads or features up to this.
    """

    name: ClassVar[str] = "mesa"
    positional: ClassVar[str | None] = "decay"
    card: ClassVar[Card] = Card(
        summary="all saved tensors in 8 bits, with ranges per head averaged over steps, by hooks",
        paper="Pan et al. 2021, arXiv 2111.11124",
        leading=(),
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 8616 / 17691,
                setting="DeiT-B, batch 128, autocast float16, V100",
                source="README of github.com/ziplab/Mesa",
            ),
        ),
        rank=20,
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS, SAVED_RESULTS)

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    groups: Annotated[int, Field(ge=1, le=1024)] = 16

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward with hooks on the model; see :func:`with_packed_saved_tensors` for what is raised."""
        packer = SavedTensors(RunningRanges(self.decay, self.groups))
        return with_packed_saved_tensors(self, setup, packer, "saved tensors, 8 bits", rules=Rules())
