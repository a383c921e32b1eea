"""Layers with torch's own forward pass, whose backward pass reads their packed input."""
