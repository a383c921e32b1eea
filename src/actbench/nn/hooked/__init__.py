"""Whole models whose saved tensors are packed by hooks, whatever their layers are (GACT, arXiv 2206.11357)."""

from actbench.nn.hooked.forward import HookedForward
from actbench.nn.hooked.hooks import Hooks

__all__ = ["HookedForward", "Hooks"]
