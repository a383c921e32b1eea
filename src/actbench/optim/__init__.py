"""Optimizers that keep their state packed in a few bits, in place of torch's of the same names."""

from __future__ import annotations

from actbench.optim.base import PackedOptimizer
from actbench.optim.optimizers import SGD, Adam, AdamW, packed

__all__ = ["SGD", "Adam", "AdamW", "PackedOptimizer", "packed"]
