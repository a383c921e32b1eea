from __future__ import annotations

from pathlib import Path

import pytest
from writtenrecipes import RECIPE, written

from actbench.errors import RecipeError
from actbench.run import recipes
from actbench.run.recipes import Recipe

SCHEME = '[[scheme]]\nspec = "exact"\n'
BAD = {
    "no title": (RECIPE.replace("title", "# title"), "title: is missing"),
    "empty title": (RECIPE.replace("What does each scheme save?", ""), "title: '' must "),
    "no workload": ('title = "?"', "section [workload] is missing: write it as "),
    "workload is not a table": ('title = "?"\nworkload = 3', "workload: 3 is not a table"),
    "no model": (RECIPE.replace("model", "# model"), "workload.model: is missing"),
    "model of another type": (RECIPE.replace('"tiny"', "3"), "workload.model: 3 must "),
    "empty list": (RECIPE.replace('"tiny"', "[]"), "workload.model: is empty: write at least one value"),
    "value twice": (RECIPE.replace('"tiny"', '["a", "a"]'), "workload.model: 'a' is given twice"),
    "batch size 0": (RECIPE.replace("8", "0"), "workload.batch_size: 0 must "),
    "batch size in a list": (RECIPE.replace("8", "[8, -1]"), "workload.batch_size[1]: -1 must "),
    "batch size 2.5": (RECIPE.replace("8", "2.5"), "workload.batch_size: 2.5 must "),
    "batch size true": (RECIPE.replace("8", "true"), "workload.batch_size: True must "),
    "batch range": (RECIPE.replace("8", '"8-4*2"'), "workload.batch_size: batch size '8-4*2'"),
    "unknown dtype": (
        RECIPE + 'dtype = "int8"',
        "workload.dtype: 'int8' is not one of 'float32', 'bfloat16' or ",
    ),
    "unknown key": (RECIPE + "batchsize = 8", "workload.batchsize: unknown key; did you mean 'batch_size'? allowed: "),
    "key of another section": (
        'models = ["tiny-vit"]\n' + RECIPE,
        "models: unknown key; 'model' is a key of 'workload': write it",
    ),
    "unknown section": (RECIPE + "[mesure]", "mesure: unknown key; did you mean 'measure'? allowed: title, "),
    "unknown meter": (RECIPE + '[measure]\nmeters = ["gpu"]', "measure.meters[0]: 'gpu' is not one of 'simulated', "),
    "meter twice": (RECIPE + '[measure]\nmeters = ["cpu", "cpu"]', "measure.meters: 'cpu' is given twice"),
    "meter of a scheme": (
        RECIPE + '[[scheme]]\nspec = "smaq"\nmeters = ["cuda"]',
        "scheme[0].meters: this recipe measures on simulated",
    ),
    "meter of a scheme that is added": (
        f'cumulative = true\n{RECIPE}[[scheme]]\nspec = "smaq"\nmeters = ["simulated"]\n[[scheme]]\nspec = "release"',
        "scheme[0].meters: a cumulative recipe adds it on every meter",
    ),
    "memory limit": (RECIPE + '[measure]\nmemory_limit = "much"', "measure.memory_limit: 'much' is not an amount of"),
    "switch": (RECIPE + '[measure]\nlargest_batch = "yes"', "measure.largest_batch: 'yes' must "),
    "seconds": (RECIPE + "[measure]\nmin_seconds = -1", "measure.min_seconds: -1 must "),
    "nan": (RECIPE + "[measure]\nmin_seconds = nan", "measure.min_seconds: nan must "),
    "no spec": (RECIPE + SCHEME + "[[scheme]]\nlabel = 'x'", "scheme[1].spec: is missing"),
    "spec grammar": (RECIPE + SCHEME + '[[scheme]]\nspec = "fewbit:"', "scheme[1].spec: scheme 'fewbit:': nothing"),
    "bits as a key": (RECIPE + '[[scheme]]\nspec = "fewbit"\nbits = 3', "scheme[0].bits: unknown key; allowed: spec, "),
    "model of a scheme": (
        RECIPE + '[[scheme]]\nspec = "x"\nmodels = ["huge"]',
        "scheme[0].models: 'huge' is not a model of this recipe: tiny",
    ),
    "scheme twice": (RECIPE + SCHEME + SCHEME, "scheme: the same scheme is given twice: 'exact' and 'exact'"),
    "scheme twice in another order": (
        RECIPE + '[[scheme]]\nspec = "a:1+b"\n[[scheme]]\nspec = "b+a:1"',
        "scheme: the same scheme is given twice: 'a:1+b' and 'b+a:1'",
    ),
    "case twice": (
        'title = "?"' + 2 * '\n[[workload]]\nmodel = "tiny"\nbatch_size = 8',
        "the same case is given twice: tiny, batch size 8, exact (simulated)",
    ),
    "published quantity": (
        RECIPE + "[[scheme]]\nspec = 'x'\npublished = [{quantity = 'speed', value = 1, setting = '', source = ''}]",
        "scheme[0].published[0].quantity: 'speed' is not one of 'peak_saving', ",
    ),
    "published key": (
        RECIPE + "[[scheme]]\nspec = 'x'\npublished = [{paper = 'x'}]",
        "scheme[0].published[0].paper: unknown key; allowed: quantity, value, setting, source",
    ),
    "broken TOML": (
        RECIPE + "[measure",
        "the recipe is not valid TOML: Expected ']' at the end of a table",
    ),
    "TOML key twice": (
        RECIPE + 'model = "b"\n',
        "the recipe is not valid TOML: Cannot overwrite a value (at line 7",
    ),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_mistake_is_told_with_its_file_and_place(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(RecipeError) as caught:
        recipes.load(path)

    assert f"{path}: {told}" in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE.replace("8", "0") + "[measure]\nseed = -1\n")

    with pytest.raises(RecipeError) as caught:
        recipes.load(path)

    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["workload.batch_size", "measure.seed"]


@pytest.mark.parametrize("name", ["missing.toml", "no/such/recipe"])
def test_a_missing_file_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot be read: No such file"):
        recipes.load(tmp_path / name)


def test_a_folder_and_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"title = '\xff'")

    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        recipes.load(tmp_path)
    with pytest.raises(RecipeError, match=r"is not UTF-8 text \(byte 9\)"):
        recipes.load(tmp_path / "bytes.toml")


def test_an_unknown_name_is_told_with_those_that_ship() -> None:
    with pytest.raises(RecipeError, match="there is no recipe 'quickstrat'; did you mean 'quickstart'"):
        recipes.load("quickstrat")


@pytest.mark.parametrize(
    ("workload", "measure", "schemes", "told"),
    [
        ({"model": "tiny", "batch_size": "8-"}, {}, [], "command line: --batch-size: batch size '8-'"),
        ({"model": "tiny"}, {}, [], "command line: --batch-size: is missing"),
        ({"batch_size": 8}, {}, [], "command line: MODEL: is missing"),
        ({"model": "tiny", "batch_size": 8}, {"memory_limit": "0"}, [], "command line: --memory-limit: '0' is not an"),
        ({"model": "tiny", "batch_size": 8}, {"meters": ["gpu"]}, [], "command line: --meter: 'gpu' is not one of"),
        ({"model": "tiny", "batch_size": 8}, {}, ["fewbit:"], "command line: --scheme: scheme 'fewbit:': nothing"),
        ({"model": "tiny", "batch_size": 8}, {}, ["x", "x"], "command line: --scheme: the same scheme is given twice"),
    ],
)
def test_a_mistake_in_a_flag_is_told_with_the_flag(
    workload: dict[str, object], measure: dict[str, object], schemes: list[str], told: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_flags(workload, measure, schemes)

    assert str(caught.value).startswith(told)
