"""Optimizers that keep their state packed in a few bits, in place of torch's of the same names."""

from __future__ import annotations

from actbench.optim.adam import Adam, AdamW
from actbench.optim.base import PackedOptimizer
from actbench.optim.sgd import SGD
from actbench.optim.twins import packed

__all__ = ["SGD", "Adam", "AdamW", "PackedOptimizer", "packed"]
