"""The recipe of docs/recipes.md spans what the page says, and the page names every key."""

from __future__ import annotations

import tomllib
from pathlib import Path

from actbench.run.recipes import Recipe
from actbench.run.recipes.sections import Measure, SchemeRow, WorkloadGrid

PAGE = Path(__file__).parents[3].joinpath("docs", "recipes.md").read_text(encoding="utf-8")


def test_the_recipe_of_the_page_spans_the_cases_that_the_page_counts() -> None:
    text = PAGE.split("```toml\n")[1].split("```")[0]
    recipe = Recipe.validated({"name": "page", **tomllib.loads(text)}, "docs/recipes.md")
    cases = recipe.cases()

    counted = PAGE.split("12 + 12 + 6 = ")[1].split(" ")[0]
    assert len(cases) == int(counted)
    points = {(planned.case.model, planned.case.batch_size, planned.case.sequence_length) for planned in cases}
    assert len(points) == 12


def test_the_page_names_every_key() -> None:
    for section in (WorkloadGrid, Measure, SchemeRow):
        for key in section.model_fields:
            assert f"`{key}`" in PAGE, key
