"""Low-rank adapters: LoRA (Hu et al., arXiv 2106.09685) and QLoRA (Dettmers et al., arXiv 2305.14314)."""
