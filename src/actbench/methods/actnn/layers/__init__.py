"""Layers with torch's own forward pass, whose backward pass reads their packed input."""

from actbench.methods.actnn.layers.layers import compressed

__all__ = ["compressed"]
