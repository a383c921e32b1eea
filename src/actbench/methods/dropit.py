"""DropIT (Chen et al., arXiv 2202.13808) and Back Razor: only the largest elements are saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.actnn.packedinputs import with_packed_inputs
from actbench.ops import bitpack
from actbench.packing import Codec, Parts, SavedTensors, SiteState
from actbench.packing.layout import Layout
from actbench.scheme.base import LINEAR_LAYERS, SAVED_RESULTS, SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.packedsaved import with_packed_saved_tensors
from actbench.scheme.setup import TrainingSetup


@dataclass(frozen=True)
class Largest(Codec):
    """The elements of largest magnitude, the others become zeros; parts are values, and 1 bit an element for places."""

    drops: ClassVar[bool] = True

    share: float

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return (ceil(share elements),) of the tensor's type and uint8 (ceil(elements / 8),)."""
        count, flags = math.ceil(self.share * layout.elements), torch.zeros_like(flat, dtype=torch.uint8)
        flags.index_fill_(0, flat.abs().topk(count, sorted=False).indices, 1)
        return flat[torch.nonzero_static(flags, size=count)[:, 0]], bitpack.pack_codes(flags, 1)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor with zeros where elements were dropped."""
        flags = bitpack.unpack_codes(parts[1], 1, layout.elements).view(torch.bool)
        return layout.laid_out(parts[0].new_zeros(layout.elements).masked_scatter_(flags, parts[0]))

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of the values, and ``ceil(elements / 8)``."""
        values = math.ceil(self.share * layout.elements) * layout.dtype.itemsize
        return values + bitpack.packed_bytes(layout.elements, 1)


class DropIT(Scheme):
    """Linear layers and convolutions save the elements of largest magnitude of their inputs, and drop the others.

    Paper: Chen et al., "DropIT: Dropping Intermediate Tensors for Memory-Efficient DNN Training", arXiv 2202.13808.
    Kept for backward: for each input ``ceil(share elements)`` values in its type, and ``ceil(elements / 8)`` bytes for
    their places; for ReLU, dropout and pools, which may save the same tensor, an exact small code. The forward pass and
    the gradients of inputs and biases are exact; those of weights are biased: dropped elements count as zero.
    Not reproduced: places as 32-bit numbers, which take more bytes for shares above 1/32.

    Attributes:
        share: Share of an input's elements to save, up to 0.9; the paper saves 0.1 and more.
    """

    name: ClassVar[str] = "dropit"
    positional: ClassVar[str | None] = "share"
    card: ClassVar[Card] = Card(
        summary="linear layers and convolutions save their input without its small elements",
        paper="Chen et al. 2022, arXiv 2202.13808",
        variants=(":0.25", ":0.1"),
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)

    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace layers by ones that drop, or save a small code; see :mod:`actbench.methods.actnn.packedinputs`."""
        codec, becomes, bits = Largest(self.share), f"input, {self.share:.0%} of it", 32 * self.share + 1
        return with_packed_inputs(self, setup, codec, lambda _, path: SiteState(path, bits), becomes, norms=False)


class BackRazor(Scheme):
    """Saved-tensor hooks keep the elements of largest magnitude of each saved tensor, and drop the others.

    Paper: Jiang et al., "Back Razor: Memory-Efficient Transfer Learning by Self-Sparsified Backpropagation", NeurIPS
    2022. Kept for backward: for each saved floating-point tensor ``ceil(share elements)`` values in its type, and
    ``ceil(elements / 8)`` bytes for their positions; a bit per element for booleans, dropout's masks and ReLU. It
    sparsifies the saved tensors of norms, softmax, activations, products of activations, linear layers and
    convolutions; ``dropit`` sparsifies only the inputs of the latter two.
    The forward pass is exact. Gradients are biased: dropped elements count as zero, also where gradients of inputs are
    functions of them. What a backward pass divides by stays whole: divisors, and what roots, logarithms and powers
    save.
    Not reproduced: products that compute on the sparse form.

    Attributes:
        share: Share of a tensor's elements to save, up to 0.9. Which shares the paper takes was not checked.
    """

    name: ClassVar[str] = "backrazor"
    positional: ClassVar[str | None] = "share"
    card: ClassVar[Card] = Card(
        summary="all saved tensors without their small elements, by hooks",
        paper="Jiang et al., NeurIPS 2022",
        rank=20,
        variants=(":0.25", ":0.1"),
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS, SAVED_RESULTS)

    share: Annotated[float, Field(gt=0, le=0.9)] = 0.1

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward with hooks on the model; see :func:`with_packed_saved_tensors` for what is raised."""
        packer = SavedTensors(Largest(self.share))
        return with_packed_saved_tensors(
            self, setup, packer, f"saved tensors, {self.share:.0%} of each", rules=small_codes()
        )
