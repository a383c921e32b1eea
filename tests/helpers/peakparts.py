"""What fills a peak: mostly saved activations, or mostly what the model is."""

from __future__ import annotations

from actbench.model.measured import PeakParts
from actbench.units import GIB

ACTIVATIONS = PeakParts(weights_bytes=GIB, activation_bytes=38 * GIB, temporary_bytes=GIB)
STATE = PeakParts(weights_bytes=GIB, gradients_bytes=GIB, optimizer_bytes=2 * GIB, temporary_bytes=GIB)
