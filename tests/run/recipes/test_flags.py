"""Flags make a recipe, and take the place of what a recipe says."""

from __future__ import annotations

from pathlib import Path

from writtenrecipes import RECIPE, loaded

from actbench.run.recipes import Recipe


def test_flags_make_the_recipe_that_a_file_would(tmp_path: Path) -> None:
    from_file = loaded(tmp_path, RECIPE + '[measure]\nmeters = ["cpu"]\n[[scheme]]\nspec = "fewbit:3"\n')
    from_flags = Recipe.from_flags(
        {"model": "tiny", "batch_size": "8", "dtype": None}, {"meters": ["cpu"], "seed": None}, ["fewbit:3"]
    )

    assert from_flags.cases() == from_file.cases()
    assert from_flags.name == "tiny"


def test_flags_take_the_place_of_what_a_recipe_says(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE + '[[scheme]]\nspec = "fewbit:3"\n')
    changed = found.with_flags({"batch_size": "16,32", "model": None}, {"memory_limit": "8GiB"}, ["checkpoint"])

    assert [(planned.case.batch_size, planned.case.scheme) for planned in changed.cases()] == [
        (16, "exact"),
        (16, "checkpoint"),
        (32, "exact"),
        (32, "checkpoint"),
    ]
    assert {planned.case.memory_limit_bytes for planned in changed.cases()} == {8 * 1024**3}
    assert (changed.name, changed.title) == (found.name, found.title)
    assert found.with_flags() == found


def test_a_flag_makes_any_recipe_cumulative(tmp_path: Path) -> None:
    schemes = ["exact", "fewbit:3", "checkpoint"]
    expected = ["exact", "fewbit:3", "fewbit:3+checkpoint"]
    from_flags = Recipe.from_flags({"model": "tiny", "batch_size": 8}, schemes=schemes, cumulative=True)
    changed = loaded(tmp_path, RECIPE).with_flags(schemes=schemes, cumulative=True)

    assert [planned.case.scheme for planned in from_flags.cases()] == expected
    assert [planned.case.scheme for planned in changed.cases()] == expected
