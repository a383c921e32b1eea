"""A scheme for actbench: saved tensors as integers of few bits."""
