from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.formats.encoded import Encoded
from actbench.methods.formats.encodings.fp8 import Fp8
from actbench.model.provenance import Published
from actbench.packing import Codec, SavedTensors, SiteState
from actbench.scheme.base import SAVED_RESULTS, SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.packedsaved import with_packed_saved_tensors
from actbench.scheme.setup import TrainingSetup

_SOURCE = "abstract of arXiv 2410.19313"


@dataclass(frozen=True)
class MixedGranularity(Codec):
    """8-bit floats (e4m3): one scale for a tensor that a product with a weight saves, else one for each group."""

    group_size: int  # in the order of memory

    @property
    def compiles(self) -> bool:
        """Whether hooks may pack by the format in graphs of ``torch.compile``."""
        return True

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return 8-bit floats with one float32 scale or a bfloat16 scale for each group, or 1 bit for booleans."""
        if x.dtype == torch.bool:
            return super().at(x, site)
        if site.product:
            return Encoded(Fp8(group_size=x.numel()))
        return Encoded(Fp8(group_size=self.group_size, scale="bfloat16"))


class Coat(Scheme):
    """Saved-tensor hooks pack all saved tensors into 8-bit floats.

    Paper: Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training", arXiv
    2410.19313 (ICLR 2025), its activations in mixed granularity.
    Kept for backward: 1 byte per element (e4m3, to the nearest). Tensors saved by linear layers and convolutions have
    one float32 scale, all others (norms, activation functions, products of two activations, attention) a bfloat16 scale
    for each group of 16 elements. Booleans, dropout masks and the masks of ReLU take 1 bit.
    A tensor that several operators save is packed once, in the format of the first; parameters and the batch stay
    whole. ``encode:fp8,on=activations`` has groups of one size for all tensors.
    The forward pass is exact: it computes in the model's types. The gradients have the error of rounding to 3 bits of
    fraction, which is the same for the same values and does not average out.
    Not reproduced: products in FP8, which need the authors' one scale a tensor; the optimizer's states (see
    ``adamfp8``); the kernels that find the largest magnitude group by group.

    Attributes:
        group_size: Elements that share a scale. Whether the paper has 16 was not checked in its text.
    """

    name: ClassVar[str] = "coat"
    card: ClassVar[Card] = Card(
        summary="all saved tensors in 8-bit floats, by hooks",
        paper="Xi et al. 2024, arXiv 2410.19313",
        leading=(),
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 1 / 1.54,
                setting="with optimizer states, against BF16",
                source=_SOURCE,
            ),
        ),
        rank=20,
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS, SAVED_RESULTS)

    group_size: Annotated[int, Field(ge=4, le=1024)] = 16

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward with hooks on the model; see :func:`with_packed_saved_tensors` for what is raised."""
        packer = SavedTensors(MixedGranularity(self.group_size))
        return with_packed_saved_tensors(self, setup, packer, "saved tensors, 8-bit floats", rules=small_codes())
