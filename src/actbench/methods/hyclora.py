"""HyC-LoRA: inputs in few bits, with the channels of outliers apart (MLSys 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from actbench.methods.actnn.ops import groupquant
from actbench.methods.actnn.packedinputs import with_packed_inputs
from actbench.model.gradient import Gradient
from actbench.ops.noise import fresh_seed
from actbench.packing import OfRows, Parts, SiteState
from actbench.packing.layout import Layout
from actbench.scheme.base import LINEAR_LAYERS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup


@dataclass(frozen=True)
class OutlierChannels(OfRows):
    """Codes of a few bits in groups, and the channels with the largest magnitudes whole.

    Attributes:
        width: Bits of a code.
        outliers: The share of channels (elements of a row) that are whole, rounded up.
        group_size: Elements that share two bounds.
        stochastic: Whether rounding keeps the mean; else it is to the nearest.
    """

    width: int
    outliers: float
    group_size: int
    stochastic: bool

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return codes, bounds, (rows, k) values of the tensor's type, and the k channels, int32."""
        rows = flat.view(-1, layout.shape[-1])
        channels = rows.abs().amax(0).topk(self._whole(layout), sorted=False).indices
        rest = rows.index_fill(1, channels, 0).view(-1)
        codes, words = groupquant.encode(rest, self.width, self.group_size, fresh_seed(rest), self.stochastic)
        return codes, words, rows.index_select(1, channels), channels.to(torch.int32)

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the tensor."""
        codes, words, values, channels = parts
        flat = groupquant.decode(codes, words, self.width, self.group_size, 0, layout.elements, layout.dtype)
        flat.view(-1, layout.shape[-1]).index_copy_(1, channels.long(), values)
        return layout.laid_out(flat)

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of codes and bounds, and of k values a row and k numbers of channels."""
        whole, rows = self._whole(layout), layout.elements // layout.shape[-1]
        codes = groupquant.packed_bytes(layout.elements, self.width, self.group_size)
        return codes + whole * (rows * layout.dtype.itemsize + 4)

    def _whole(self, layout: Layout) -> int:
        return math.ceil(self.outliers * layout.shape[-1])


class HycLora(Scheme):
    """Linear layers, above all those of adapters, save their input in few bits, and its outlier channels exactly.

    Paper: "HyC-LoRA: Memory Efficient LoRA Fine-tuning with Hybrid Activation Compression", MLSys 2025.
    Kept for backward: for each input of a trained weight, codes of ``bits`` per element, 4 bytes for each group, and
    the values of outlier channels, those with the largest magnitudes, in the input's type; for ReLU, dropout
    and pools, which may save the same tensor, an exact small code. Layers that read one tensor pack it once.
    Convolutions keep their input whole. With ``lora`` only the inputs of adapters are saved, so only these are packed.
    With ``bits=8,outliers=0.001`` it is 8-bit rounding of adapters' inputs. The forward pass and the gradients of
    inputs and biases are exact; those of weights are unbiased if rounding is stochastic.
    Not reproduced: the paper's kernels that fuse norms, attention and activations in few bits; ``gact`` packs what
    these operators save.

    Attributes:
        bits: Bits of a code, 1 to 8.
        outliers: The share of channels that stay whole; at least one does.
        group_size: Elements that share two bounds, a multiple of 32 from 32 to 1024.
        stochastic: Whether rounding is stochastic, without bias; else it is to the nearest.
    """

    name: ClassVar[str] = "hyclora"
    positional: ClassVar[str | None] = "bits"
    card: ClassVar[Card] = Card(
        summary="linear layers and adapters save inputs in few bits, and outlier channels exactly",
        paper="HyC-LoRA, MLSys 2025",
        variants=(":8", ":4", ":2"),
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)

    bits: Annotated[int, Field(ge=1, le=8)] = 2
    outliers: Annotated[float, Field(gt=0, le=0.5)] = 0.02
    group_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 128
    stochastic: bool = True

    @property
    def gradient(self) -> Gradient:
        """Unbiased if rounding is stochastic."""
        return "unbiased" if self.stochastic else "approximate"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace layers by ones that pack, or save a small code; see :mod:`actbench.methods.actnn.packedinputs`."""
        codec = OutlierChannels(self.bits, self.outliers, self.group_size, self.stochastic)
        becomes = f"input, {self.bits} bits, {self.outliers:.1%} of its channels whole"
        return with_packed_inputs(
            self,
            setup,
            codec,
            lambda _, path: SiteState(path, self.bits),
            becomes,
            norms=False,
            convolutions=False,
        )
