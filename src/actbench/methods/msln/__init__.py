"""MS-LN and MS-RMSNorm: norms that share their output with the next layers (Yang et al., arXiv 2406.16282)."""
