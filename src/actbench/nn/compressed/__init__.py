"""Layers with torch's own forward pass, whose backward pass reads their packed input."""

from actbench.nn.compressed.layers import compressed

__all__ = ["compressed"]
