"""Layers with torch's own forward pass, whose backward pass reads their packed input."""

from actbench.methods.actnn.layers.layers import compressed, small_codes

__all__ = ["compressed", "small_codes"]
