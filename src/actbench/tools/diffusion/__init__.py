"""Denoisers of latent diffusion models, by their published architectures; diffusers builds them."""
