"""The scheme: which tensors it packs, by which codec, and what it says of itself."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from actbench.methods.actnn.layers.layers import small_codes
from actbench.packing import SavedTensors
from actbench.scheme import SAVED_RESULTS, SAVED_TENSORS, Card, Scheme, TrainingSetup, with_packed_saved_tensors
from theirs.codec import Integers


class Theirs(Scheme):
    """Saved-tensor hooks pack whatever autograd saves into integers of few bits.

    Kept for backward: each saved floating-point tensor in ``bits`` bits an element, and 8 bytes for each 128 elements;
    booleans, and the masks of ReLU and dropout, in 1 bit. The forward pass is exact. Decoded tensors are unbiased, and
    so is a gradient that is linear in them.

    Attributes:
        bits: Bits of an element.
    """

    name: ClassVar[str] = "theirs"
    positional: ClassVar[str | None] = "bits"
    card: ClassVar[Card] = Card(
        summary="whatever is saved for backward, as integers of few bits", rank=20, variants=(":8", ":4")
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS, SAVED_RESULTS)
    gradient: ClassVar[str] = "unbiased"

    bits: Annotated[int, Field(ge=1, le=8)] = 4

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind hooks on the model; a ConversionError if it trains nothing, or has such hooks already."""
        packer, becomes = SavedTensors(Integers(self.bits)), f"saved tensors, {self.bits} bits"
        return with_packed_saved_tensors(self, setup, packer, becomes, rules=small_codes())
