"""Linear layers that save their input in 8-bit floats, with one scale for a tensor or for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from actbench.methods.actnn.packedinputs import with_packed_inputs
from actbench.methods.formats.encoded import Encoded
from actbench.methods.formats.encodings.fp8 import Fp8
from actbench.packing import Codec, SiteState
from actbench.packing.layout import memory_order
from actbench.scheme.base import LINEAR_LAYERS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import TrainingSetup

Scaling = Literal["tensorwise", "rowwise"]


@dataclass(frozen=True)
class ScaledFloat8(Codec):
    """8-bit floats (e4m3) with one float32 scale for a tensor, or for each row of its last dimension.

    Rows that are not whole in memory share the scale of the tensor.
    """

    scaling: Scaling

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        return super().why_not(x) or (None if x.dtype == torch.bool else self._format(x).why_not(x))

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return the format for a tensor."""
        return super().at(x, site) if x.dtype == torch.bool else self._format(x)

    def _format(self, x: Tensor) -> Encoded:
        order = memory_order(x)
        rows = self.scaling == "rowwise" and (order is None or order[-1] == x.dim() - 1)
        return Encoded(Fp8(group_size=x.shape[-1] if rows else x.numel()))


class Float8(Scheme):
    """Linear layers save their input in 8-bit floats, scaled by its largest magnitude.

    Paper: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433; scalings are named as torchao's
    recipes. torchao computes products in such floats, but saves input and weight uncast, and casts them again in
    the backward pass: its float8 training saves what the exact model saves. This scheme saves the cast input.
    Kept for backward: for each input 1 byte an element (e4m3, to the nearest) and 4 for the scale of the tensor, or of
    each row; for ReLU, dropout and pools, which may save the same tensor, an exact small code. Layers that read one
    tensor pack it once. Inputs of convolutions and all other tensors stay whole: ``coat`` packs these as well.
    The forward pass and the gradients of inputs and biases are exact; those of weights have the error of rounding to 3
    bits of fraction, which is the same for the same values and does not average out.
    Not reproduced: products in 8-bit floats, here they are computed in the types of the model; scales that are powers
    of two; the second copy of an input with scales for each feature, which rowwise gradients of weights take.

    Attributes:
        scaling: tensorwise, one scale for a tensor; rowwise, one for each row (token).
    """

    name: ClassVar[str] = "float8"
    positional: ClassVar[str | None] = "scaling"
    card: ClassVar[Card] = Card(
        summary="linear layers save their input in 8-bit floats, with one scale per tensor or per row",
        paper="Micikevicius et al. 2022, arXiv 2209.05433",
        variants=(":rowwise",),
        leading=(),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)

    scaling: Scaling = "tensorwise"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace layers by ones that pack, or save a small code; see :mod:`actbench.methods.actnn.packedinputs`."""
        return with_packed_inputs(
            self,
            setup,
            ScaledFloat8(self.scaling),
            lambda _, path: SiteState(path, 8),
            f"input, 8-bit floats, {self.scaling}",
            norms=False,
            convolutions=False,
        )
