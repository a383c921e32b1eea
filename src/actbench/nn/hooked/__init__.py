"""Hooks that pack the saved tensors of a whole model, whatever its layers (GACT, arXiv 2206.11357)."""

from actbench.nn.hooked.forward import HookedForward
from actbench.nn.hooked.hooks import Hooks

__all__ = ["HookedForward", "Hooks"]
