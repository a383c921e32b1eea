"""What to compare: recipes as TOML files or flags, and the grids of cases they span."""

from __future__ import annotations

from actbench.run.recipes.files import KINDS, closest, files_of
from actbench.run.recipes.recipe import Recipe
from actbench.run.recipes.sections import Planned, parse_batch_range

__all__ = ["KINDS", "Planned", "Recipe", "closest", "files_of", "load", "names", "parse_batch_range", "source"]

load = Recipe.load
names, source = Recipe.files.names, Recipe.files.source
