"""Packs the saved tensors of a converted model, and decides which tensors stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _python_dispatch

from actbench.ops.hostmemory import is_elsewhere
from actbench.ops.library import holds_its_values, is_watched, traced
from actbench.ops.noise import captures, seed_on
from actbench.packing import savedtensors
from actbench.packing.codecs import Codec, OnHost, Packed, Parts, Repeated, Unpacked, unpacked
from actbench.packing.hostoffload import HostOffload
from actbench.packing.layout import Layout, flat_of, without_repeats
from actbench.packing.savedtensors import ByStorage, SharingTable, WeakTensors
from actbench.packing.sitestate import SiteState
from actbench.units import format_bytes

_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)


class SitePlan:
    """Which codec packs a tensor at a site, in which layout, or why none does: it follows from shapes and settings.

    It holds for all tensors of this shape, strides, type and device, while the settings of the site are the same.
    What depends on the tensor itself is asked each time: whether others hold its memory, and what is in it.

    Attributes:
        codec: The codec of the tensor, if it is packed.
        layout: The layout of the tensor.
        reason: Why the tensor is not packed, or None.
        device: The device of the tensor.
        elements: How many elements the tensor has.
        encode: What makes the parts of plain tensors, from the tensor and a seed; None for the codec's own way.
        shared: Whether another site asked for its tensor, or this one for another's, since the plan was made. If not,
            the site need not tell others what it packs.
    """

    __slots__ = (
        "_bits", "_dtype", "_of", "_product", "_row", "_shape", "_stride",
        "codec", "device", "elements", "encode", "layout", "reason", "shared",
    )  # fmt: skip

    def __init__(self, x: Tensor, site: SiteState, of: Codec, reason: str | None) -> None:
        self._shape, self._stride, self._dtype, self.device = x.shape, x.stride(), x.dtype, x.device
        self._bits, self._row, self._product, self._of = site.bits, site.row, site.product, of
        self.reason, self.shared = reason, False
        self.codec = of if reason else of.at(x, site)
        self.layout, self.elements = Layout.of(x), x.numel()
        self.encode = None if reason else self.codec.planned(x.detach())

    def holds(self, x: Tensor, site: SiteState, of: Codec) -> bool:
        """Return whether the plan is that of a tensor at its site, for a model packed by a codec."""
        return (
            type(x) is Tensor
            and x.dtype is self._dtype
            and x.shape == self._shape  # one by one: to put them into a tuple takes longer
            and x.stride() == self._stride
            and x.device == self.device
            and site.bits == self._bits
            and site.row == self._row
            and site.product is self._product
            and of is self._of
            and not site.per_sample
            and site.sample_gradients is None
        )


class Exclude:
    """Excludes tensors that others hold anyway, and tensors without their own memory. A copy of this knows no tensor.

    Args:
        smallest_bytes: Bytes below which a tensor is excluded.
        subclasses: Whether tensors of every subclass are excluded, not only those that wrap other tensors.
    """

    def __init__(self, smallest_bytes: int = 0, *, subclasses: bool = False) -> None:
        self.smallest_bytes, self.subclasses = smallest_bytes, subclasses
        self._held: ByStorage[bool] = ByStorage()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that others hold (parameters, the batch): packing them would add to memory."""
        for tensor in tensors:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if self._held.get(storage) is None:  # parameters are the same in each pass
                    self._held.put(storage, True)

    def why_not(self, x: Tensor) -> str | None:
        """Return why a tensor is excluded, or None."""
        if x.layout != torch.strided:
            return f"layout {x.layout}"
        if type(x) is not Tensor:
            if self._is_subclass(x):
                return f"a {type(x).__name__}"
            if isinstance(x, nn.Parameter):  # of another part, or FSDP's
                return "a parameter"
        return self.why_held(x) or self.why_small(x)

    def why_held(self, x: Tensor) -> str | None:
        """Return why the memory of a strided tensor is excluded, or None."""
        base = x._base
        if base is not None and isinstance(base, nn.Parameter):
            return "a parameter"
        return "a parameter, a buffer or a part of the batch" if self._held.get(x.untyped_storage()) else None

    def why_small(self, x: Tensor) -> str | None:
        """Return why the size of a tensor excludes it, or None."""
        is_small = self.smallest_bytes > 0 and x.nbytes < self.smallest_bytes
        return f"smaller than {format_bytes(self.smallest_bytes)}" if is_small else None

    def _is_subclass(self, x: Tensor) -> bool:
        if type(x) in _PLAIN:
            return False
        wraps: bool = _python_dispatch.is_traceable_wrapper_subclass(x)
        return wraps or self.subclasses

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Exclude, self.smallest_bytes, subclasses=self.subclasses), ()


@dataclass(eq=False)  # frozen ones take longer to make
class StaysHere:
    """A saved tensor that a hook did not pack, and its version, which autograd does not check under hooks."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> StaysHere:
        """Return the entry for a tensor.

        The tensor is held without its graph: a node that saves its own output would never be freed. A parameter is held
        itself: its ``data`` may get other memory.
        """
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was changed in place after it was saved; autograd raises the same without hooks.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers; torch makes a name for each, which takes several times as long."""
    parts, found = [module], {module}
    for part in parts:
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield tensor
        new = [child for child in part._modules.values() if child is not None and child not in found]
        found.update(new)
        parts += new


_NOTHING = nullcontext()

ON_HOST = "it is in host memory already"
"""Why a tensor in host memory is not moved."""


class SavedTensors:
    """Packs tensors for backward; one object serves a whole model, and a copy of it knows no tensor.

    Args:
        codec: The number format of packed tensors.
        exclude: Which tensors are never packed; None for those that others hold anyway.
        placement: Where the parts wait: in host memory, or on the device for None.
        dedup: Whether a tensor that several sites save is packed once; False packs it for each of them.
    """

    def __init__(
        self, codec: Codec, *, exclude: Exclude | None = None, placement: HostOffload | None = None, dedup: bool = True
    ) -> None:
        self.codec, self.placement = codec, placement
        self.exclude = Exclude() if exclude is None else exclude
        self.dedup: SharingTable[tuple[Packed, SiteState]] | None = SharingTable() if dedup else None
        self._planned = self._settled = False  # in this pass; since the last plan

    def why_not(self, x: Tensor) -> str | None:
        """Return why a tensor is neither packed nor moved, or None."""
        return self.exclude.why_not(x) or self._why_of_kind(x)

    def settle(self) -> None:
        """End a forward pass: release the leaving tensors, of which none is left on the device afterwards."""
        self._settled, self._planned = not self._planned, False
        if self.placement is not None:
            self.placement.settle()

    def pack(self, x: Tensor, site: SiteState) -> Packed:
        """Pack a tensor of any kind at a site, or return what another site packed of the unchanged tensor.

        A graph that is traced has no memory to know tensors by: there each site packs for itself.
        """
        plan: SitePlan | None = site.plan
        if plan is not None and (encode := plan.encode) is not None and self._may_be_at_once(plan, x, site):
            site.owner, site.elements = None, plan.elements
            parts, count = encode(x, seed_on(plan.device))
            if site.guarded:
                if count == 0:
                    site.was_finite = True
                elif (lost := self._lost(x, x, plan.codec, parts, site)) is not None:
                    return lost
            return Packed(plan.codec, plan.layout, parts)
        if traced() or torch.compiler.is_compiling():
            return self._in_graph(x, site)
        if plan is None or not plan.holds(x, site, self.codec):
            once = without_repeats(x)
            if once is not x:
                return self._repeated(x, self.pack(once, site))
            plan = self._plan(x, site)
        site.begin(x)
        reason = self.why_not(x) if plan is None else self.exclude.why_held(x) or plan.reason
        if reason is not None:
            return self._left(x, reason)
        codec, layout = (self.codec.at(x, site), Layout.of(x)) if plan is None else (plan.codec, plan.layout)
        if self._is_alone(plan):
            return self._packed(x, flat_of(x, layout), codec, layout, site)
        return self._shared(x, flat_of(x, layout), codec, layout, site)

    def _is_alone(self, plan: SitePlan | None) -> bool:
        """Return whether a site asks no table of shared tensors: there is none, or a whole pass asked for nothing."""
        return self.dedup is None or (self._settled and plan is not None and not plan.shared)

    def _may_be_at_once(self, plan: SitePlan, x: Tensor, site: SiteState) -> bool:
        """Return whether a tensor may be encoded as it lies: neither it nor its ranges are asked for."""
        return (
            self._is_alone(plan)
            and not (site.watched or savedtensors.observers)
            and not is_watched()
            and holds_its_values(x)
            and plan.holds(x, site, self.codec)
            and self.exclude.why_held(x) is None
            and not (site.guarded and x.is_cuda and captures())
        )

    def _in_graph(self, x: Tensor, site: SiteState) -> Packed:
        once = without_repeats(x)
        if once is not x:
            return self._repeated(x, self._in_graph(once, site))
        if self.codec.why_not(x) is not None:
            return unpacked(x)
        codec, layout = self.codec.at(x, site), Layout.of(x)
        return Packed(codec, layout, codec.pack(flat_of(x, layout), layout, site))

    def _shared(self, x: Tensor, flat: Tensor, codec: Codec, layout: Layout, site: SiteState) -> Packed:
        """Return what another site packed of a tensor, or pack it and remember that for other sites."""
        assert self.dedup is not None
        source = flat if flat.untyped_storage() is x.untyped_storage() else x.detach()
        purpose = x.shape[:1] if site.per_sample else None  # bits per row fit only tensors with as many rows
        known = self.dedup.recall(source, purpose)
        if known is None:
            packed = self._packed(x, flat, codec, layout, site)
            if not isinstance(packed.codec, Unpacked):
                weak = _Reference(Packed(packed.codec, layout, ()), WeakTensors(*packed.parts), site)
                self.dedup.remember(source, weak, purpose)
            return packed
        packed, owner = known
        for one in (site, owner):
            if one.plan is not None:
                one.plan.shared = True
        site.share(owner)
        savedtensors.acted(self)
        return packed._replace(layout=layout)

    def _packed(self, x: Tensor, flat: Tensor, codec: Codec, layout: Layout, site: SiteState) -> Packed:
        """Encode the elements of a tensor."""
        if site.guarded and x.is_cuda and captures():
            return self._left(x, "it may hold infinities, and values cannot be read while a CUDA graph is captured")
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            # an autograd function runs without gradients already, and to enter the context takes time
            parts = codec.pack(flat, layout, site)
        if site.guarded and not isinstance(x, FakeTensor):  # a fake tensor has no values to check
            lost = self._lost(x, flat, codec, parts, site)
            if lost is not None:
                return lost
        if self.placement is not None and is_elsewhere(x):
            codec, parts = OnHost(codec, x.device, self.placement), self.placement.away(parts)
        if savedtensors.observers:
            savedtensors.packed(x, *parts, by=self, closed_form=partial(codec.packed_bytes, layout))
        return Packed(codec, layout, parts)

    def _lost(self, x: Tensor, flat: Tensor, codec: Codec, parts: Parts, site: SiteState) -> Packed | None:
        """Return a tensor as it is where its parts would lose values of it, else None; the site notes which."""
        lost = codec.lost(flat, parts)
        site.was_finite = lost is None
        if lost is None:
            return None
        site.elements = 0
        return self._left(x, lost)

    def _repeated(self, x: Tensor, once: Packed) -> Packed:
        """Return the packed tensor that repeats elements of another, packed ``once``."""
        if isinstance(once.codec, Unpacked):
            return unpacked(x)
        return Packed(Repeated(once.codec, once.layout), Layout.of(x), once.parts)

    def _plan(self, x: Tensor, site: SiteState) -> SitePlan | None:
        """Decide what happens to a tensor at a site, and keep that for tensors like it in later steps.

        Return None where it may be another thing each time, or a step saves none of the host's time.
        """
        usual = type(x) is Tensor and x.layout == torch.strided and not self.codec.exact and x.dtype != torch.bool
        if not usual or self.placement is not None or site.per_sample or site.sample_gradients is not None:
            site.plan = None
            return None
        reason = self.exclude.why_small(x) or self._why_of_kind(x)
        self._planned, self._settled = True, False
        site.plan = plan = SitePlan(x, site, self.codec, reason)
        return plan

    def stands_for(self, x: Tensor, packed: Packed) -> None:
        """Record that a tensor was decoded from parts: saving it then saves these parts, without a new encoding.

        The parts live as long as the storage of the tensor, or as autograd holds them.
        """
        savedtensors.packed(x, *packed.parts, by=self)
        known = (packed, SiteState("output of a module", packed.bits))
        if self.dedup is not None:
            self.dedup.remember(flat_of(x), lambda: known)

    def _why_of_kind(self, x: Tensor) -> str | None:
        """Return why the codec takes no tensor of this kind, or why neither it nor the placement would change one."""
        reason = self.codec.why_not(x)
        if reason is not None:
            return reason
        if not self.codec.exact or (self.placement is not None and is_elsewhere(x)):
            return None
        return "nothing is packed and nothing moved" if self.placement is None else ON_HOST

    def _left(self, x: Tensor, reason: str) -> Packed:
        self.leave(x, reason)
        return unpacked(x)

    def leave(self, x: Tensor, reason: str) -> None:
        """Record that a tensor is not packed, and why."""
        savedtensors.left(x, reason)
        if self.codec.exact:  # to leave it whole is what was asked
            savedtensors.acted(self)


@dataclass(frozen=True)
class _Reference:
    """A packed tensor and its site, as long as others hold its parts."""

    packed: Packed
    parts: WeakTensors
    site: SiteState

    def __call__(self) -> tuple[Packed, SiteState] | None:
        parts = self.parts()
        return None if parts is None else (self.packed._replace(parts=parts), self.site)
