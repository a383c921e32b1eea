"""What a training step keeps and computes, in number formats: saved tensors, gradient maps, gradients and weights."""

from actbench.nn.encoded.form import Encoded, encoded, through
from actbench.nn.encoded.gradients import PackedGradients
from actbench.nn.encoded.keeper import EncodedKeeper
from actbench.nn.encoded.outputs import EncodedOutputs, quantized_modules
from actbench.nn.encoded.rounded import RoundedState, RoundedWeights, rounded
from actbench.nn.encoded.stepping import StepByParameter

__all__ = [
    "Encoded",
    "EncodedKeeper",
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
