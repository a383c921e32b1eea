"""MLPs that run a piece of the sequence at a time, forward and backward (Bekman et al., arXiv 2506.13996)."""
