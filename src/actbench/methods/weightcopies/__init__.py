"""Copies of the weights beside the model: float32 master weights, and a moving average."""
