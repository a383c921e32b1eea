"""Hooks that pack the saved tensors of a whole model, whatever its layers (GACT, arXiv 2206.11357)."""

from actbench.packing.hooked.forward import HookedForward
from actbench.packing.hooked.hooks import Hooks

__all__ = ["HookedForward", "Hooks"]
