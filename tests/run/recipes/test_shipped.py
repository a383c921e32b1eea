"""The recipes that ship with actbench."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import RecipeError
from actbench.run import recipes


def test_every_shipped_recipe_loads_and_asks_a_question() -> None:
    titles = {name: recipes.Recipe.files.title(name) for name in recipes.names()}

    assert "quickstart" in titles
    assert all(title.endswith("?") for title in titles.values())
    assert all(recipes.load(name).name == name for name in titles)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # the second with a byte order mark
def test_the_text_of_a_shipped_recipe_can_be_copied(tmp_path: Path, encoding: str) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(recipes.source("quickstart"), encoding=encoding)

    assert recipes.load(copy).cases() == recipes.load("quickstart").cases()
    with pytest.raises(RecipeError, match="there is no recipe 'mine'"):
        recipes.source("mine")


def test_the_quickstart_searches_the_processor_within_little_memory_and_changes_no_case_without_a_search():
    recipe = recipes.load("quickstart")
    assert {planned.case.memory_limit_bytes for planned in recipe.cases()} == {None}
    searched = [planned.case for planned in recipe.with_flags(measure={"largest_batch": True}).cases()]
    assert {(case.meter, case.memory_limit_bytes) for case in searched} == {("simulated", None), ("cpu", 384 * 2**20)}
    limited = recipe.with_flags(measure={"largest_batch": True, "memory_limit": 2**30}).cases()
    assert {planned.case.memory_limit_bytes for planned in limited} == {2**30}
