"""Optimizers with state packed in a few bits or in host memory, and one that steps in the backward pass."""

from __future__ import annotations

from actbench.optim.base import PackedOptimizer
from actbench.optim.inbackward import StepInBackward
from actbench.optim.onhost import HostOptimizer
from actbench.optim.optimizers import SGD, Adam, AdamW, packed

__all__ = ["SGD", "Adam", "AdamW", "HostOptimizer", "PackedOptimizer", "StepInBackward", "packed"]
