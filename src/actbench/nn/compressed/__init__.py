"""Layers with torch's own forward pass whose backward pass has only what a keeper kept of their input."""

from actbench.nn.compressed.layers import compressed

__all__ = ["compressed"]
