"""What to compare: recipes as TOML files or flags, and the grids of cases they span."""

from __future__ import annotations

from actbench.recipe.axes import parse_batch_range
from actbench.recipe.recipe import Recipe
from actbench.recipe.sections import PlannedCase

__all__ = ["PlannedCase", "Recipe", "load", "names", "parse_batch_range", "shipped", "source"]

load, shipped = Recipe.load, Recipe.shipped
names, source = Recipe.shelf.names, Recipe.shelf.source
