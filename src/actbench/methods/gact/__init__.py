"""GACT: hooks pack all saved tensors, with bits by sensitivity (Liu et al., arXiv 2206.11357)."""
