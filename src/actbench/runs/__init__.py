"""Training runs, written down: recipes of them, their records, and the tables and charts made of those; no torch."""

from __future__ import annotations

from actbench.runs.recipe import TrainingRecipe, load, names, shipped, source

__all__ = ["TrainingRecipe", "load", "names", "shipped", "source"]
