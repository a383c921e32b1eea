"""Encodings: number formats that store or simulate tensors of training, with their bytes and their loss."""

from __future__ import annotations

import re
from typing import Final

from actbench.methods.formats.encodings.encoding import Encoding, Parts, Rounding, parts_bytes
from actbench.methods.formats.encodings.fp8 import Fp8, S2fp8
from actbench.methods.formats.encodings.nf4 import Nf4
from actbench.methods.formats.encodings.nnwbdi import NnwBdi
from actbench.methods.formats.encodings.packed import Bf16, Fp16, IntGroups, Smaq, SmaqParameters
from actbench.methods.formats.encodings.simulated import SmaqSimulated
from actbench.methods.formats.encodings.snr import DISTRIBUTIONS, Distribution, Quality, snr_db, snr_table
from actbench.model import spec

__all__ = [
    "COMPARED",
    "DISTRIBUTIONS",
    "ENCODINGS",
    "Bf16",
    "Distribution",
    "Encoding",
    "Fp8",
    "Fp16",
    "IntGroups",
    "Nf4",
    "NnwBdi",
    "Parts",
    "Quality",
    "Rounding",
    "S2fp8",
    "Smaq",
    "SmaqParameters",
    "SmaqSimulated",
    "build",
    "parts_bytes",
    "snr_db",
    "snr_table",
]

ENCODINGS: Final[dict[str, type[Encoding]]] = {
    kind.name: kind for kind in (Bf16, Fp16, Fp8, S2fp8, IntGroups, Nf4, Smaq, SmaqSimulated, NnwBdi)
}
"""The encodings by name."""

COMPARED: Final = (
    "bf16",
    "fp16",
    "fp8:e4m3",
    "fp8:e5m2",
    "s2fp8",
    "int:6",
    "int:8,group_size=256",
    "smaq",
    "smaq,rounding=nearest",
    "smaq_simulated",
    "smaq_simulated,rounding=nearest",
    "smaq_simulated,clamp=true",
    "nnwbdi",
)
"""What ``actbench encodings`` compares unless told otherwise."""

_SHORT = re.compile(r"^int(\d+)(?=,|$)")


def build(text: str) -> Encoding:
    """Build the encoding that a specification names: ``NAME[:VALUE][,key=value…]``, such as ``fp8:e5m2``.

    ``int6`` is short for ``int:6``, and so on for other widths.

    Raises:
        SpecError: A name, key or value is wrong; the message says what is allowed.
    """
    about, part = f"encoding {text!r}", _SHORT.sub(r"int:\1", text.strip())
    kind = spec.find_named(re.split("[:,]", part)[0], ENCODINGS, "encoding", text)
    built = spec.build(kind, kind.positional, spec.parse_part(part, about), about)
    spec.check_sizes(built, about)
    return built
