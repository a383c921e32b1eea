"""Layers with torch's own forward pass whose backward pass has only what was packed of their input."""

from actbench.nn.compressed.layers import compressed

__all__ = ["compressed"]
