"""Training runs, written down: recipes of them, their records, and the tables and charts made of those; no torch."""

from __future__ import annotations

from actbench.runs.recipe import TrainingRecipe

__all__ = ["TrainingRecipe", "load", "names", "shipped", "source"]

load, shipped = TrainingRecipe.load, TrainingRecipe.shipped
names, source = TrainingRecipe.shelf.names, TrainingRecipe.shelf.source
