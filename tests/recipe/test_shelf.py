from __future__ import annotations

from pathlib import Path

import pytest

from actbench import recipe, runs
from actbench.errors import RecipeError
from actbench.recipe.shelf import SWEEPS, TRAININGS


@pytest.mark.parametrize(
    ("load", "name", "told"),
    [
        (runs.load, "quickstart", "quickstart is a recipe of 'actbench sweep': run 'actbench sweep quickstart'"),
        (recipe.load, "digits", "digits is a recipe of 'actbench train': run 'actbench train digits'"),
        (recipe.source, "digits", "run 'actbench train digits'"),
    ],
)
def test_a_recipe_of_the_other_verb_says_so(load, name, told) -> None:
    with pytest.raises(RecipeError, match=told):
        load(name)


def test_a_file_for_the_other_verb_says_so(tmp_path: Path) -> None:
    trains, measures = tmp_path / "trains.toml", tmp_path / "measures.toml"
    trains.write_text(TRAININGS.source("digits"))
    measures.write_text(SWEEPS.source("quickstart"))

    for load, file, verb in ((recipe.load, trains, "train"), (runs.load, measures, "sweep")):
        with pytest.raises(
            RecipeError, match=f"^{file} is a recipe of 'actbench {verb}': run 'actbench {verb} {file}'$"
        ):
            load(file)
