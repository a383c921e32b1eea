"""Number formats for saved tensors, weights, gradients and optimizer state: SmaQ (Shoghi et al., IEEE CAL 2021), COAT
(Xi et al., arXiv 2410.19313), S2FP8, NF4, NNW-BDI and integers.
"""
