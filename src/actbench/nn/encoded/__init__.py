"""Number formats for data of a training step: saved tensors, gradient maps, gradients and weights."""

from actbench.nn.encoded.fakequant import EncodedOutputs, RoundedState, RoundedWeights, quantized_modules, rounded
from actbench.nn.encoded.form import Encoded, encoded, through
from actbench.nn.encoded.gradients import PackedGradients, StepByParameter

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
