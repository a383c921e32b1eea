"""Searches for the schemes with which a model fits on a card."""
