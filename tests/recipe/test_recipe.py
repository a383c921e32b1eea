from __future__ import annotations

from pathlib import Path

import pytest

from actbench import recipe
from actbench.errors import RecipeError
from actbench.recipe import Recipe

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
    return recipe.load(written(folder, text))


def test_a_recipe_is_named_after_its_file(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE)

    assert (found.name, found.title) == ("question", "What does each scheme save?")


def test_without_schemes_only_the_exact_model_is_measured(tmp_path: Path) -> None:
    (planned,) = loaded(tmp_path, RECIPE).cases()

    assert (planned.case.model, planned.case.scheme, planned.case.meter) == ("tiny", "exact", "simulated")


def test_lists_span_the_grid_and_exact_is_put_first(tmp_path: Path) -> None:
    text = """
    title = "?"
    [workload]
    model = ["a", "b"]
    batch_size = "8-16*2"
    attention = ["eager", "sdpa"]
    autocast = ["none", "bfloat16"]
    [measure]
    meters = ["simulated", "cpu"]
    seed = [0, 1]
    [[scheme]]
    spec = "fewbit:3"
    """
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]

    assert len(cases) == len({case.key() for case in cases}) == 2 * 2 * 2 * 2 * 2 * 2 * 2
    assert [case.scheme for case in cases[:4]] == ["exact", "fewbit:3"] * 2
    assert {case.autocast for case in cases} == {None, "bfloat16"}


def test_exact_stays_where_its_author_put_it(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE + '[[scheme]]\nspec = "fewbit:3"\n[[scheme]]\nspec = "exact"\n')

    assert [planned.case.scheme for planned in found.cases()] == ["fewbit:3", "exact"]


def test_several_workloads_stand_beside_each_other(tmp_path: Path) -> None:
    text = """
    title = "?"
    [[workload]]
    model = "text"
    batch_size = 32
    sequence_length = 128
    [[workload]]
    model = "images"
    batch_size = [8, 16]
    """
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]

    assert [(case.model, case.batch_size, case.sequence_length) for case in cases] == [
        ("text", 32, 128),
        ("images", 8, None),
        ("images", 16, None),
    ]


def test_a_workload_has_meters_and_a_scheme_has_models_of_its_own(tmp_path: Path) -> None:
    text = """
    title = "?"
    [[workload]]
    model = "text"
    batch_size = 32
    [[workload]]
    model = "images"
    batch_size = 8
    meters = ["cpu"]
    [[scheme]]
    spec = "fewbit:3"
    models = "text"
    [[scheme]]
    spec = "checkpoint"
    """
    found = loaded(tmp_path, text)
    cases = [planned.case for planned in found.cases()]
    on_cuda = found.with_flags(measure={"meters": ["cuda"]})

    assert [(case.model, case.meter, case.scheme) for case in cases] == [
        ("text", "simulated", "exact"),
        ("text", "simulated", "fewbit:3"),
        ("text", "simulated", "checkpoint"),
        ("images", "cpu", "exact"),
        ("images", "cpu", "checkpoint"),
    ]
    assert {planned.case.meter for planned in on_cuda.cases()} == {"cuda"}


def test_a_scheme_has_other_published_figures_for_another_model(tmp_path: Path) -> None:
    text = """
    title = "?"
    [workload]
    model = ["a", "b", "c"]
    batch_size = 8
    [[scheme]]
    spec = "exact"
    [[scheme]]
    spec = "x+y"
    models = ["a", "b"]
    [[scheme]]
    spec = "y+x"
    models = "c"
    published = [{ quantity = "largest_batch", value = 9, setting = "c", source = "table 4" }]
    """
    cases = loaded(tmp_path, text).cases()

    assert [(planned.case.model, planned.case.scheme, len(planned.published)) for planned in cases] == [
        ("a", "exact", 0),
        ("a", "x+y", 0),
        ("b", "exact", 0),
        ("b", "x+y", 0),
        ("c", "exact", 0),
        ("c", "y+x", 1),
    ]
    with pytest.raises(RecipeError, match=r"scheme: the same scheme stands twice: 'x\+y' and 'y\+x'"):
        loaded(tmp_path, text.replace('"c"\n    published', '["b", "c"]\n    published'))


def test_labels_and_published_figures_go_with_their_scheme(tmp_path: Path) -> None:
    scheme = """
    [[scheme]]
    spec = "fewbit:3"
    label = "3-bit GELU"
    published = [{ quantity = "peak_saving", value = 0.138, setting = "batch 128", source = "table 4" }]
    """
    exact, fewbit = loaded(tmp_path, RECIPE + scheme).cases()

    assert (exact.label, exact.published) == (None, ())
    assert fewbit.label == "3-bit GELU"
    assert [(figure.quantity, figure.value) for figure in fewbit.published] == [("peak_saving", 0.138)]


def test_settings_reach_the_cases_they_concern(tmp_path: Path) -> None:
    measure = """
    [measure]
    meters = ["simulated", "cpu"]
    device_profile = "cuda-16gib"
    memory_limit = "16GiB"
    largest_batch = true
    min_steps = 3
    min_seconds = 0
    """
    text = RECIPE.replace("batch_size = 8", "batch_size = [16, 8]") + measure
    cases = [planned.case for planned in loaded(tmp_path, text).cases()]
    simulated = [case for case in cases if case.meter == "simulated"]
    cpu = [case for case in cases if case.meter == "cpu"]

    assert {case.memory_limit_bytes for case in cases} == {16 * 1024**3}
    assert {(case.device_profile, case.min_steps) for case in simulated} == {("cuda-16gib", 10)}
    assert {(case.device_profile, case.min_steps, case.min_seconds) for case in cpu} == {(None, 3, 0.0)}


def test_only_the_smallest_batch_size_asks_for_the_largest_batch(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", "batch_size = [16, 8, 32]") + "[measure]\nlargest_batch = true\n"

    assert {planned.case.batch_size: planned.case.find_largest_batch for planned in loaded(tmp_path, text).cases()} == {
        16: False,
        8: True,
        32: False,
    }


SCHEME = '[[scheme]]\nspec = "exact"\n'
BAD = {
    "no title": (RECIPE.replace("title", "# title"), "title: is missing"),
    "empty title": (RECIPE.replace("What does each scheme save?", ""), "title: '' is not allowed"),
    "no workload": ('title = "?"', "workload: is missing"),
    "workload is no table": ('title = "?"\nworkload = 3', "workload: 3 is not a table"),
    "no model": (RECIPE.replace("model", "# model"), "workload.model: is missing"),
    "model of another type": (RECIPE.replace('"tiny"', "3"), "workload.model: 3 is not allowed"),
    "empty list": (RECIPE.replace('"tiny"', "[]"), "workload.model: is empty: write at least one value"),
    "value twice": (RECIPE.replace('"tiny"', '["a", "a"]'), "workload.model: 'a' stands twice"),
    "batch size 0": (RECIPE.replace("8", "0"), "workload.batch_size: 0 is not allowed"),
    "batch size in a list": (RECIPE.replace("8", "[8, -1]"), "workload.batch_size[1]: -1 is not allowed"),
    "batch size 2.5": (RECIPE.replace("8", "2.5"), "workload.batch_size: 2.5 is not allowed"),
    "batch size true": (RECIPE.replace("8", "true"), "workload.batch_size: True is not allowed"),
    "batch range": (RECIPE.replace("8", '"8-4*2"'), "workload.batch_size: batch size '8-4*2'"),
    "unknown dtype": (
        RECIPE + 'dtype = "int8"',
        "workload.dtype: 'int8' is not one of 'float32', 'bfloat16' or ",
    ),
    "unknown key": (RECIPE + "batchsize = 8", "workload.batchsize: unknown key; did you mean 'batch_size'? allowed: "),
    "unknown section": (RECIPE + "[mesure]", "mesure: unknown key; did you mean 'measure'? allowed: title, "),
    "unknown meter": (RECIPE + '[measure]\nmeters = ["gpu"]', "measure.meters[0]: 'gpu' is not one of 'simulated', "),
    "meter twice": (RECIPE + '[measure]\nmeters = ["cpu", "cpu"]', "measure.meters: 'cpu' stands twice"),
    "memory limit": (RECIPE + '[measure]\nmemory_limit = "much"', "measure.memory_limit: 'much' is not an amount of"),
    "switch": (RECIPE + '[measure]\nlargest_batch = "yes"', "measure.largest_batch: 'yes' is not allowed"),
    "seconds": (RECIPE + "[measure]\nmin_seconds = -1", "measure.min_seconds: -1 is not allowed"),
    "nan": (RECIPE + "[measure]\nmin_seconds = nan", "measure.min_seconds: nan is not allowed"),
    "no spec": (RECIPE + SCHEME + "[[scheme]]\nlabel = 'x'", "scheme[1].spec: is missing"),
    "spec grammar": (RECIPE + SCHEME + '[[scheme]]\nspec = "fewbit:"', "scheme[1].spec: scheme 'fewbit:': nothing"),
    "bits as a key": (RECIPE + '[[scheme]]\nspec = "fewbit"\nbits = 3', "scheme[0].bits: unknown key; allowed: spec, "),
    "model of a scheme": (
        RECIPE + '[[scheme]]\nspec = "x"\nmodels = ["huge"]',
        "scheme[0].models: 'huge' is not a model of this recipe: tiny",
    ),
    "scheme twice": (RECIPE + SCHEME + SCHEME, "scheme: the same scheme stands twice: 'exact' and 'exact'"),
    "scheme twice in another order": (
        RECIPE + '[[scheme]]\nspec = "a:1+b"\n[[scheme]]\nspec = "b+a:1"',
        "scheme: the same scheme stands twice: 'a:1+b' and 'b+a:1'",
    ),
    "case twice": (
        'title = "?"' + 2 * '\n[[workload]]\nmodel = "tiny"\nbatch_size = 8',
        "the same case stands twice: tiny, batch size 8, exact (simulated)",
    ),
    "published quantity": (
        RECIPE + "[[scheme]]\nspec = 'x'\npublished = [{quantity = 'speed', value = 1, setting = '', source = ''}]",
        "scheme[0].published[0].quantity: 'speed' is not one of 'peak_saving', ",
    ),
    "published key": (
        RECIPE + "[[scheme]]\nspec = 'x'\npublished = [{paper = 'x'}]",
        "scheme[0].published[0].paper: unknown key; allowed: quantity, value, setting, source",
    ),
    "broken TOML": (RECIPE + "[measure", "not valid TOML: Expected ']' at the end of a table declaration (at "),
    "TOML key twice": (RECIPE + 'model = "b"\n', "not valid TOML: Cannot overwrite a value (at line 7, column "),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_mistake_is_told_with_its_file_and_place(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(RecipeError) as caught:
        recipe.load(path)

    assert f"{path}: {told}" in str(caught.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE.replace("8", "0") + "[measure]\nseed = -1\n")

    with pytest.raises(RecipeError) as caught:
        recipe.load(path)

    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["workload.batch_size", "measure.seed"]


@pytest.mark.parametrize("name", ["missing.toml", "no/such/recipe"])
def test_a_missing_file_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot be read: No such file"):
        recipe.load(tmp_path / name)


def test_a_folder_and_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"title = '\xff'")

    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        recipe.load(tmp_path)
    with pytest.raises(RecipeError, match=r"is not UTF-8 text \(byte 9\)"):
        recipe.load(tmp_path / "bytes.toml")


def test_an_unknown_name_is_told_with_those_that_ship() -> None:
    with pytest.raises(RecipeError, match="there is no recipe 'quickstrat'; did you mean 'quickstart'"):
        recipe.load("quickstrat")


def test_every_shipped_recipe_loads_and_asks_a_question() -> None:
    titles = recipe.shipped()

    assert "quickstart" in titles
    assert all(title.endswith("?") for title in titles.values())
    assert all(recipe.load(name).name == name for name in titles)


def test_the_text_of_a_shipped_recipe_can_be_copied(tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(recipe.source("quickstart"), encoding="utf-8")

    assert recipe.load(copy).cases() == recipe.load("quickstart").cases()
    with pytest.raises(RecipeError, match="there is no recipe 'mine'"):
        recipe.source("mine")


def test_flags_make_the_recipe_that_a_file_would(tmp_path: Path) -> None:
    from_file = loaded(tmp_path, RECIPE + '[measure]\nmeters = ["cpu"]\n[[scheme]]\nspec = "fewbit:3"\n')
    from_flags = Recipe.from_flags(
        {"model": "tiny", "batch_size": "8", "dtype": None}, {"meters": ["cpu"], "seed": None}, ["fewbit:3"]
    )

    assert from_flags.cases() == from_file.cases()
    assert from_flags.name == "tiny"


@pytest.mark.parametrize(
    ("workload", "measure", "schemes", "told"),
    [
        ({"model": "tiny", "batch_size": "8-"}, {}, [], "command line: --batch-size: batch size '8-'"),
        ({"model": "tiny"}, {}, [], "command line: --batch-size: is missing"),
        ({"batch_size": 8}, {}, [], "command line: MODEL: is missing"),
        ({"model": "tiny", "batch_size": 8}, {"memory_limit": "0"}, [], "command line: --memory-limit: '0' is not an"),
        ({"model": "tiny", "batch_size": 8}, {"meters": ["gpu"]}, [], "command line: --meter: 'gpu' is not one of"),
        ({"model": "tiny", "batch_size": 8}, {}, ["fewbit:"], "command line: --scheme: scheme 'fewbit:': nothing"),
        ({"model": "tiny", "batch_size": 8}, {}, ["x", "x"], "command line: --scheme: the same scheme stands twice"),
    ],
)
def test_a_mistake_in_a_flag_is_told_with_the_flag(
    workload: dict[str, object], measure: dict[str, object], schemes: list[str], told: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_flags(workload, measure, schemes)

    assert str(caught.value).startswith(told)


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
