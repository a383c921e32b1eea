"""Recomputing blocks in the backward pass (Chen et al., arXiv 1604.06174; Korthikanti et al., arXiv 2205.05198)."""
