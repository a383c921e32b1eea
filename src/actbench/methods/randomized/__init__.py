"""Linear layers that save a random sketch of their input (Bershatsky et al., arXiv 2201.13195)."""
