"""Cross entropy in pieces of the rows, without whole logits (Hsu et al., arXiv 2410.10989)."""
