"""Schemes that keep copies of the weights: float32 master weights, and a moving average."""
