from __future__ import annotations

from typing import ClassVar, Self

from pydantic import field_validator, model_validator

from actbench.errors import SpecError
from actbench.methods.formats import encodings
from actbench.methods.formats.encodings import Encoding
from actbench.methods.formats.structures import EncodedStructures
from actbench.scheme.card import Card


class Encode(EncodedStructures):
    """Stores data structures of a training step in any number format of ``actbench encodings``.

    The format follows the colon, and its keys follow the format after ``/``: ``encode:bf16``, ``encode:int:6``,
    ``encode:fp8:e5m2/scale=bfloat16,on=activations``. ``encode:smaq_simulated`` is SmaQ as its authors ran it, and
    frees no memory; with ``on=weights/gradients/activations/maps/state,forward=lossy`` it does all that they did.
    Kept for backward: with ``activations``, each saved floating-point tensor in the format, where that is smaller, and
    masks in 1 bit. The rest is as in ``smaq``.

    Attributes:
        encoding: The format.
        on: Which data structures; weights and maps are always simulated, the others if the format is.
        forward: exact, or lossy: modules compute on quantized outputs.
    """

    name: ClassVar[str] = "encode"
    positional: ClassVar[str | None] = "encoding"
    card: ClassVar[Card] = Card(
        summary="saved tensors, optimizer state and more in a number format: encode:int:6, encode:fp8:e4m3",
        rank=20,
        # Not on=state in 8 bits: it takes as many bytes as that of ``adam8bit``, and longer.
        variants=(
            ":fp8:e4m3,on=activations",
            ":int:6,on=activations",
            ":int:6,on=state",
            ":int:6",
        ),
        leading=(),
    )

    encoding: str

    @field_validator("encoding")
    @classmethod
    def _canonical(cls, encoding: str) -> str:
        text = encoding.replace("/", ",")
        try:
            return encodings.build(text).spec.replace(",", "/")
        except SpecError as error:
            raise ValueError(str(error).removeprefix(f"encoding {text!r}: ")) from None

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if not self.number_format.fixed_rate and self.on != ("weights",):
            raise ValueError(
                f"{self.encoding} has no fixed rate: its bytes depend on the values, so that it works for "
                "weights only; write on=weights, or choose int:6"
            )
        return self

    @property
    def number_format(self) -> Encoding:
        """The format that the specification names."""
        return encodings.build(self.encoding.replace("/", ","))
