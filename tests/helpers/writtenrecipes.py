"""A recipe of one case, and the recipe that a text is."""

from __future__ import annotations

from pathlib import Path

from actbench.run import recipes
from actbench.run.recipes import Recipe

RECIPE = """
title = "What does each scheme save?"

[workload]
model = "tiny"
batch_size = 8
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "question.toml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str) -> Recipe:
    return recipes.load(written(folder, text))
