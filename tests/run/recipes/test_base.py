from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench.errors import RecipeError
from actbench.run import recipes
from actbench.run.recipes.files import BaseRecipe
from actbench.tools.train import recipe as runs

SWEEP = """
title = "?"
[[workload]]
model = "tiny"
batch_size = 8
[[scheme]]
spec = "fewbit:3"
"""
TRAINING = """
title = "?"
[[train]]
model = "tiny"
data = "digits"
batch_size = 8
steps = 4
optimizer = "sgd"
learning_rate = 0.1
[[scheme]]
spec = "fewbit:3"
"""
KINDS = {"sweep": (recipes.Recipe, SWEEP, "workload"), "train": (runs.TrainingRecipe, TRAINING, "train")}
both = pytest.mark.parametrize(("kind", "text", "section"), KINDS.values(), ids=KINDS)


def mistakes(kind: type[BaseRecipe], tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        kind.load(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


@both
def test_mistakes_are_told_in_the_order_of_the_recipe(
    kind: type[BaseRecipe], text: str, section: str, tmp_path: Path
) -> None:
    wrong = text.replace("?", "").replace("8", "0").replace("fewbit:3", "fewbit:") + "[nothing]\n"
    told = mistakes(kind, tmp_path, wrong)

    places = [line.split(":")[0] for line in told]
    assert places == ["title", f"{section}[0].batch_size", "scheme[0].spec", "nothing"]
    allowed = told[-1].partition("allowed: ")[2].split(", ")
    assert (allowed[:3], allowed[-1]) == (["title", "name", section], "scheme")


@both
def test_what_stands_twice_is_told_before_a_model_that_is_not_there(
    kind: type[BaseRecipe], text: str, section: str, tmp_path: Path
) -> None:
    table = text[text.index(f"[[{section}]]") : text.index("[[scheme]]")]
    unknown = text + 'models = ["tiny", "huge"]\n'

    assert mistakes(kind, tmp_path, unknown) == ["scheme[0].models: 'huge' is not a model of this recipe: tiny"]
    (told,) = mistakes(kind, tmp_path, unknown + table)
    assert "is given twice" in told


@both
def test_exact_is_put_first_unless_it_is_there(kind: type[BaseRecipe], text: str, section: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert [row.spec for row in kind.load(path).rows("tiny")] == ["exact", "fewbit:3"]

    path.write_text(text + '[[scheme]]\nspec = "exact"\n')
    assert [row.spec for row in kind.load(path).rows("tiny")] == ["fewbit:3", "exact"]


@pytest.mark.parametrize(("load", "text"), [(recipes.load, SWEEP), (runs.load, TRAINING)])
def test_a_file_may_begin_with_a_byte_order_mark(load: Any, text: str, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain" / "mine.toml", tmp_path / "marked" / "mine.toml"
    for path, encoding in ((plain, "utf-8"), (marked, "utf-8-sig")):
        path.parent.mkdir()
        path.write_text(text, encoding=encoding)

    assert load(marked) == load(plain)
