"""Host memory for saved tensors (Rhu et al., arXiv 1602.08124) and optimizer state (Ren et al., arXiv 2101.06840)."""
