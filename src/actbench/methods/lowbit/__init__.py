"""Adam with moments of few bits, of torchao and bitsandbytes (Dettmers et al., arXiv 2110.02861; Li et al., arXiv
2309.01507).
"""
