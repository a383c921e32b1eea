"""Training on several processes: DDP (Li et al., arXiv 2006.15704), ZeRO (Rajbhandari et al., arXiv 1910.02054), FSDP2
(Zhao et al., arXiv 2304.11277) and tensor parallel (Shoeybi et al., arXiv 1909.08053).
"""
