"""Number formats that tensors of training are stored in, or that are said to be, each with its bytes and its loss."""

from __future__ import annotations

from actbench.codecs.encodings.encoding import Encoding, Parts, Rounding, parts_bytes
from actbench.codecs.encodings.fp8 import Fp8, S2fp8
from actbench.codecs.encodings.nnwbdi import NnwBdi
from actbench.codecs.encodings.packed import Bf16, Fp16, IntGroups, Smaq, SmaqParameters
from actbench.codecs.encodings.registry import COMPARED, ENCODINGS, build
from actbench.codecs.encodings.simulated import SmaqSimulated, simulate_normalized
from actbench.codecs.encodings.snr import DISTRIBUTIONS, Distribution, Quality, snr_db, snr_table

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
    "simulate_normalized",
    "snr_db",
    "snr_table",
]
