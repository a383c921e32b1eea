"""Converts a model for the user's own training loop, and saves and loads converted models."""
