"""Optimizers that keep their state packed in a few bits, in place of torch's of the same names, or in host memory."""

from __future__ import annotations

from actbench.optim.base import PackedOptimizer
from actbench.optim.onhost import HostOptimizer
from actbench.optim.optimizers import SGD, Adam, AdamW, packed

__all__ = ["SGD", "Adam", "AdamW", "HostOptimizer", "PackedOptimizer", "packed"]
