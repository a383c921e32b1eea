"""Who keeps a converted model's tensors for the backward pass: packed, shared and, where asked, in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

from actbench import savedtensors
from actbench.nn.keeping.around import OnHost, Repeated
from actbench.nn.keeping.forms import AsItIs, Flags, Form, Grouped, GroupedRows, Kept, Parts, Whole, flat_of, order_of
from actbench.nn.keeping.grouping import in_groups, size_within
from actbench.nn.keeping.onegroup import in_one_group
from actbench.nn.keeping.places import Place
from actbench.nn.keeping.solver import row_widths
from actbench.nn.keeping.transfer import Transfer, is_elsewhere
from actbench.nn.layout import memory_order, without_repeats
from actbench.nn.sharing import SharingTable, WeakTensors
from actbench.ops import bitpack, groupquant, groups
from actbench.ops.seeds import fresh_seed

SMALLEST = 64
"""Elements below which a tensor stays whole: what it would gain is less than torch's allocator rounds up."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

NOT_FINITE = "values that are not finite"
"""Why a tensor is left whole whose group would be lost with one of them."""


class Keeper:
    """Keeps tensors in groups of few bits; one keeper serves a whole model, a copy of it knows no tensor.

    Args:
        group_size: Elements that share an offset and a scale, a multiple of 32 from 32 to 1024; fewer to the end of a
            row that a norm scales.
        stochastic: Round up with the probability that keeps the mean; otherwise to the nearest.
        swap: Keep the parts in host memory.
        compress: False keeps tensors as they are, for ``swap`` alone.
        chunk: Into how many pieces of the batch a layer's backward pass is cut where it can be.
        share: Keep a tensor that several places keep once; False keeps it for each of them.
        prefetch: Bring back from host memory what will be asked for next, beside what is asked for.
        per_group: False for one offset and scale for all of a tensor.
        pipeline_threshold: Bytes of a layer's gradient and input above which its backward pass is cut further.

    Attributes:
        transfer: What moves parts to host memory and back.
    """

    def __init__(
        self,
        *,
        group_size: int = 256,
        stochastic: bool = True,
        swap: bool = False,
        compress: bool = True,
        chunk: int = 1,
        share: bool = True,
        prefetch: bool = True,
        per_group: bool = True,
        pipeline_threshold: int | None = None,
    ) -> None:
        self.group_size, self.stochastic, self.swap, self.compress = group_size, stochastic, swap, compress
        self.chunk, self.share = chunk, share
        self.per_group, self.pipeline_threshold = per_group, pipeline_threshold
        self.transfer = Transfer(prefetch)
        self._sharing: SharingTable[tuple[Kept, Place]] = SharingTable()
        self._given: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Say what is kept by somebody else in any case (parameters, the batch): packing it would add to memory."""
        self._given.update(tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)

    def why_not(self, x: Tensor) -> str | None:
        """Return why a tensor is kept as it is, or None where it is packed or moved."""
        if x.layout != torch.strided:
            return f"layout {x.layout}"
        if _wraps_others(x):
            return f"a {type(x).__name__}"
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):  # of another part, or gathered by FSDP
            return "a parameter"
        if x.untyped_storage() in self._given:
            return "a parameter, a buffer or a part of the batch"
        if not self.compress:
            return None if self.swap and is_elsewhere(x) else "nothing is packed and nothing moved"
        if x.dtype not in (*FLOATS, torch.bool):
            return f"{x.dtype} is not a floating-point type"
        if x.numel() < SMALLEST:
            return "too small to gain"
        return None

    def pieces(self, size_bytes: int) -> int:
        """Return into how many pieces of the batch the backward pass of a layer is cut, where it can be.

        Args:
            size_bytes: Of the gradient of the layer's output, and of its input.
        """
        most = self.pipeline_threshold
        return self.chunk if most is None else max(self.chunk, (size_bytes + most) // most)

    def keep(self, x: Tensor, place: Place) -> Kept:
        """Return a tensor as it is kept: as for an earlier place, where it was kept before and is unchanged since.

        Args:
            x: Any shape, strides and type.
            place: Whom it is kept for; says how many bits, and is told the ranges where it is watched.
        """
        once = without_repeats(x)
        if once is not x:
            kept = self.keep(once, place)
            if isinstance(kept.form, AsItIs):
                return _as_it_is(x)
            return Kept(Repeated(kept.form, x.shape), kept.parts)
        place.begin(x)
        reason = self.why_not(x)
        if reason is not None:
            return self._left(x, reason)
        flat = flat_of(x)
        source = flat if flat.untyped_storage() is x.untyped_storage() else x.detach()
        purpose = x.shape[:1] if place.per_sample else None  # rows of one width each are rows of this height only
        known = self._sharing.recall(source, purpose) if self.share else None
        if known is not None:
            kept, owner = known
            place.share(owner)
            savedtensors.acted(self)
            return kept._replace(form=kept.form.seen_as(x))
        kept = self._packed(x, flat, place)
        if place.guarded and not isinstance(x, FakeTensor):  # a fake one says nothing of those that come
            lost = self._lost(x, kept)
            place.was_finite = lost is None
            if lost is not None:
                place.elements = 0
                return self._left(x, lost)
        kept = self._moved(x, kept)
        savedtensors.packed(x, *kept.parts, by=self)
        if self.share:
            self._sharing.remember(source, _Reference(kept.form, WeakTensors(*kept.parts), place), purpose)
        return kept

    def _lost(self, x: Tensor, kept: Kept) -> str | None:
        """Return which values made others of their group NaN, or None for none; on a device, wait for the answer."""
        grouped = isinstance(kept.form, Grouped | GroupedRows)
        return NOT_FINITE if grouped and bool((kept.parts[1] == groups.NAN_WORD).any()) else None

    @torch.no_grad()
    def _packed(self, x: Tensor, flat: Tensor, place: Place) -> Kept:
        if not self.compress:
            return Kept(Whole(x.shape, x.dtype, order_of(x)), (flat,))
        if x.dtype == torch.bool:
            return Kept(Flags(x.shape, order_of(x)), (bitpack.pack_codes(flat.view(torch.uint8), 1),))
        group_size = size_within(x, place.row, self.group_size)
        if place.per_sample and group_size is not None and self._has_rows(x):
            return self._rows(x, flat, place, group_size)
        return self._grouped(x, flat, place)

    def _moved(self, x: Tensor, kept: Kept) -> Kept:
        if not (self.swap and is_elsewhere(x)):
            return kept
        return Kept(OnHost(kept.form, x.device, self.transfer), self.transfer.away(kept.parts))

    def _grouped(self, x: Tensor, flat: Tensor, place: Place) -> Kept:
        width = min(8.0, max(1.0, place.bits))
        if self.per_group:
            kept = in_groups(x, flat, width, self.group_size, place.row, self.stochastic)
        else:
            kept = in_one_group(x, flat, round(width), self.stochastic)
        if place.watched:
            assert isinstance(kept.form, Grouped)
            place.ranges = self._in_usual_groups(groupquant.ranges(kept.parts[1]).square().sum(), kept.form.group_size)
        return kept

    def _in_usual_groups(self, squares: Tensor, group_size: int) -> Tensor:
        """Return sums over groups of a size as they would be over groups of the usual one."""
        return squares if group_size == self.group_size else squares * (group_size / self.group_size)

    def coarser(self, x: Tensor, bits: int, row: int) -> Tensor:
        """Return what so many bits leave of a tensor, contiguous.

        Args:
            x: Any shape and strides, of a float type.
            bits: 1 to 8.
            row: Elements of a row that shares no group with another; 0 where rows mean nothing.
        """
        flat = x.contiguous().view(-1)
        kept = in_groups(flat.view(x.shape), flat, bits, self.group_size, row, True)
        return kept.form.restore(kept.parts)

    def _has_rows(self, x: Tensor) -> bool:
        """Return whether rows can have widths of their own.

        Where they are not one behind the other in memory, a copy would be needed that is larger than all that is kept;
        where they are shorter than a group, a word for each would cost more than the widths gain.
        """
        order = memory_order(x)
        return x.dim() > 1 and (order is None or order[0] == 0) and x[0].numel() >= self.group_size

    def _rows(self, x: Tensor, flat: Tensor, place: Place, group_size: int) -> Kept:
        count = x.shape[0]
        rows = flat.view(count, -1)
        costs = groupquant.group_ranges(rows, group_size).square().sum(1)
        if place.watched:
            place.ranges = self._in_usual_groups(costs, group_size)
        gradients = None if place.history is None else place.history.expected(x.device)
        total_bits = min(8 * count, max(count, round(place.bits * count)))
        widths = row_widths(costs if gradients is None else costs * gradients, total_bits)
        codes, meta = groupquant.encode_rows(rows, widths, total_bits, group_size, fresh_seed(), self.stochastic)
        form = GroupedRows(x.shape, x.dtype, order_of(x), total_bits, group_size)
        return Kept(form, (codes, meta, widths))

    def _left(self, x: Tensor, reason: str) -> Kept:
        savedtensors.left(x, reason)
        if not self.compress:  # as was asked
            savedtensors.acted(self)
        return _as_it_is(x)

    def __reduce__(self) -> tuple[Any, ...]:
        anew = partial(
            Keeper,
            group_size=self.group_size,
            stochastic=self.stochastic,
            swap=self.swap,
            compress=self.compress,
            chunk=self.chunk,
            share=self.share,
            prefetch=self.transfer.prefetch,
            per_group=self.per_group,
            pipeline_threshold=self.pipeline_threshold,
        )
        return anew, ()


def _as_it_is(x: Tensor) -> Kept:
    return Kept(AsItIs(x.shape, x.dtype), (x,))


def _wraps_others(x: Tensor) -> bool:
    """Return whether a tensor has no memory of its own, but tensors inside."""
    wraps: bool = _python_dispatch.is_traceable_wrapper_subclass(x)
    return wraps


@dataclass(frozen=True)
class _Reference:
    """Gives what was kept and for whom, as long as somebody else holds its parts."""

    form: Form
    parts: WeakTensors
    place: Place

    def __call__(self) -> tuple[Kept, Place] | None:
        parts: Parts | None = self.parts()
        return None if parts is None else (Kept(self.form, parts), self.place)
