"""Number formats for data of a training step: saved tensors, gradient maps, gradients and weights."""

from actbench.nn.encoded.fakequant import EncodedOutputs, RoundedState, RoundedWeights, quantized_modules, rounded
from actbench.nn.encoded.form import Encoded, PackedGradients, StepByParameter, encoded, through

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
