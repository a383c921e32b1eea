"""Layers of one batch shared among processes: which are cut where, their parts, and what crosses between them."""
