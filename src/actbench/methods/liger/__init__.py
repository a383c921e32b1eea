"""RMS norms, rotary embeddings and gated MLPs that save what Liger's kernels save (Hsu et al., arXiv 2410.10989)."""
