"""Optimizers with less state than Adam: GaLore, APOLLO, Fira and Adam-mini."""
