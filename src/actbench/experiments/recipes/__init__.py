"""What to compare: recipes as TOML files or flags, and the grids of cases they span."""

from __future__ import annotations

from actbench.experiments.recipes.base import closest
from actbench.experiments.recipes.recipe import Recipe
from actbench.experiments.recipes.sections import Planned, parse_batch_range

__all__ = ["Planned", "Recipe", "closest", "load", "names", "parse_batch_range", "shipped", "source"]

load, shipped = Recipe.load, Recipe.shipped
names, source = Recipe.files.names, Recipe.files.source
