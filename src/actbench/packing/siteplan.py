"""What a step decides about the tensor of a site, kept for the steps after it."""

from __future__ import annotations

from torch import Tensor

from actbench.packing.codecs import Codec
from actbench.packing.layout import Layout
from actbench.packing.sitestate import SiteState


class SitePlan:
    """Which codec packs a tensor at a site, in which layout, or why none does: it follows from shapes and settings.

    It holds for all tensors of this shape, strides, type and device, while the settings of the site are the same.
    What depends on the tensor itself is asked each time: whether others hold its memory, and what is in it.

    Attributes:
        codec: The codec of the tensor, if it is packed.
        layout: The layout of the tensor.
        reason: Why the tensor is not packed, or None.
        elements: How many elements the tensor has.
        encode: What makes the parts of plain tensors, from the tensor and a seed; None for the codec's own way.
        shared: Whether another site asked for its tensor, or this one for another's, since the plan was made. If not,
            the site need not tell others what it packs.
    """

    __slots__ = ("_form", "_of", "_settings", "codec", "elements", "encode", "layout", "reason", "shared")

    def __init__(self, x: Tensor, site: SiteState, of: Codec, reason: str | None) -> None:
        self._form = (x.shape, x.stride(), x.dtype, x.device)
        self._settings, self._of = (site.bits, site.row, site.product), of
        self.reason, self.shared = reason, False
        self.codec = of if reason else of.at(x, site)
        self.layout, self.elements = Layout.of(x), x.numel()
        self.encode = None if reason else self.codec.planned(x.detach())

    def holds(self, x: Tensor, site: SiteState, of: Codec) -> bool:
        """Return whether the plan is that of a tensor at its site, for a model packed by a codec."""
        return (
            type(x) is Tensor
            and (x.shape, x.stride(), x.dtype, x.device) == self._form
            and (site.bits, site.row, site.product) == self._settings
            and of is self._of
            and not site.per_sample
            and site.sample_gradients is None
        )
