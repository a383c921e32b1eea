"""Number formats for data of a training step: saved tensors, gradient maps, gradients and weights."""

from actbench.methods.formats.encoded.fakequant import (
    EncodedOutputs,
    RoundedState,
    RoundedWeights,
    quantized_modules,
    rounded,
)
from actbench.methods.formats.encoded.form import Encoded, PackedGradients, StepByParameter, encoded, through

__all__ = [
    "Encoded",
    "EncodedOutputs",
    "PackedGradients",
    "RoundedState",
    "RoundedWeights",
    "StepByParameter",
    "encoded",
    "quantized_modules",
    "rounded",
    "through",
]
