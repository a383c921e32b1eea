"""Optimizers that keep their state packed in place of torch's, and one that steps in the backward pass."""

from __future__ import annotations

from actbench.optim.base import PackedOptimizer
from actbench.optim.inbackward import StepInBackward
from actbench.optim.optimizers import SGD, Adam, AdamW, packed

__all__ = ["SGD", "Adam", "AdamW", "PackedOptimizer", "StepInBackward", "packed"]
