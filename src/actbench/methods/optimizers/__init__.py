"""Optimizers with less state than Adam: GaLore, APOLLO, Fira, Adam-mini and Muon of 8 bits."""
