"""Gradients that are released as they are applied, in the backward pass (LOMO: Lv et al., arXiv 2306.09782)."""
