"""Activations that save a few bits or their output: few-bit (Novikov et al., arXiv 2202.00441), ReGELU2 and ReSiLU2
(Yang et al., arXiv 2406.16282), InvAct (arXiv 2407.15545).
"""
