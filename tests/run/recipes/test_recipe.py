from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import RecipeError
from actbench.run import recipes
from actbench.run.recipes import Recipe

RECIPE = """
title = "What does each scheme save?"

[workload]
model = "tiny"
batch_size = 8
"""


def loaded(folder: Path, text: str) -> Recipe:
    path = folder / "question.toml"
    path.write_text(text, encoding="utf-8")
    return recipes.load(path)


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


def test_a_scheme_has_meters_of_its_own(tmp_path: Path) -> None:
    measure = '[measure]\nmeters = ["simulated", "cpu"]\n'
    scheme = '[[scheme]]\nspec = "fewbit:3"\n[[scheme]]\nspec = "checkpoint"\nmeters = "cpu"\n'
    found = loaded(tmp_path, RECIPE + measure + scheme)

    def pairs(recipe: Recipe) -> list[tuple[str, str]]:
        return [(planned.case.meter, planned.case.scheme) for planned in recipe.cases()]

    everywhere = [(meter, spec) for meter in ("simulated", "cpu") for spec in ("exact", "fewbit:3")]
    assert pairs(found) == [*everywhere, ("cpu", "checkpoint")]
    assert pairs(found.with_flags(measure={"meters": ["simulated"]})) == everywhere[:2]


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
    with pytest.raises(RecipeError, match=r"scheme: the same scheme is given twice: 'x\+y' and 'y\+x'"):
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


def test_without_the_unchanged_model_only_schemes_are_measured(tmp_path: Path) -> None:
    found = loaded(tmp_path, f'exact = false\n{RECIPE}[[scheme]]\nspec = "exact"\n[[scheme]]\nspec = "fewbit:3"\n')
    cases = [planned.case for planned in found.cases()]
    on_cpu = found.with_flags(measure={"meters": ["cpu"]}).cases()
    by_flag = Recipe.from_flags({"model": "tiny", "batch_size": "8"}, {}, ["fewbit:3"], exact=False).cases()

    assert [(case.scheme, case.gradient_quality) for case in cases] == [("fewbit:3", True)]  # the key of other recipes
    assert [(planned.case.scheme, planned.case.gradient_quality) for planned in on_cpu] == [("fewbit:3", False)]
    assert [planned.case for planned in by_flag] == cases
    assert loaded(tmp_path, RECIPE).with_flags(schemes=["fewbit:3"], exact=False).exact is False
    with pytest.raises(RecipeError, match="nothing is measured of 'tiny': give a scheme"):
        loaded(tmp_path, f"exact = false\n{RECIPE}")


def test_lengths_of_sequences_are_an_axis_like_sizes_of_batches(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE.replace("[workload]", '[workload]\nsequence_length = "8,16-64*2"'))

    assert [planned.case.sequence_length for planned in found.cases()] == [8, 16, 32, 64]
    with pytest.raises(RecipeError, match="sequence length '0': a size is at least 1"):
        loaded(tmp_path, RECIPE.replace("[workload]", '[workload]\nsequence_length = "0"'))


STACK = """
cumulative = true
columns = "peak,saved"
[[scheme]]
spec = "fewbit:3"
models = "tiny"
[[scheme]]
spec = "checkpoint"
label = "recomputed"
[[scheme]]
spec = "gact:L2"
alone = true
[[scheme]]
spec = "offload"
"""


def test_a_cumulative_recipe_adds_one_scheme_after_the_other(tmp_path: Path) -> None:
    head, tail = STACK.split("[[scheme]]", 1)
    grid = RECIPE.replace("[workload]", f"{head}[workload]").replace('"tiny"', '["tiny", "other"]')
    found = loaded(tmp_path, f"{grid}[[scheme]]{tail}")

    stacks: dict[str, list[str]] = {}
    for planned in found.cases():
        stacks.setdefault(planned.case.model, []).append(planned.case.scheme)
    assert stacks == {
        "tiny": ["exact", "fewbit:3", "fewbit:3+checkpoint", "gact:L2", "fewbit:3+checkpoint+offload"],
        "other": ["exact", "checkpoint", "gact:L2", "checkpoint+offload"],
    }
    assert {planned.label for planned in found.cases() if planned.case.scheme.endswith("checkpoint")} == {"recomputed"}
    assert found.columns == ("peak", "saved")
    assert found.with_flags() == found


def test_a_flag_makes_any_recipe_cumulative(tmp_path: Path) -> None:
    schemes = ["exact", "fewbit:3", "checkpoint"]
    expected = ["exact", "fewbit:3", "fewbit:3+checkpoint"]
    from_flags = Recipe.from_flags({"model": "tiny", "batch_size": 8}, schemes=schemes, cumulative=True)
    changed = loaded(tmp_path, RECIPE).with_flags(schemes=schemes, cumulative=True)

    assert [planned.case.scheme for planned in from_flags.cases()] == expected
    assert [planned.case.scheme for planned in changed.cases()] == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cumulative = true", "cumulative adds schemes one after the other: give at least two in addition to exact"),
        ('columns = ["peak", "peek"]', "columns: there is no column 'peek'; did you mean peak"),
        ("columns = [1]", "columns: there is no column '1'"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        loaded(tmp_path, f"{line}\n{RECIPE}")


def test_the_quickstart_searches_the_processor_within_little_memory_and_changes_no_case_without_a_search():
    recipe = recipes.load("quickstart")
    assert {planned.case.memory_limit_bytes for planned in recipe.cases()} == {None}
    searched = [planned.case for planned in recipe.with_flags(measure={"largest_batch": True}).cases()]
    assert {(case.meter, case.memory_limit_bytes) for case in searched} == {("simulated", None), ("cpu", 384 * 2**20)}
    limited = recipe.with_flags(measure={"largest_batch": True, "memory_limit": 2**30}).cases()
    assert {planned.case.memory_limit_bytes for planned in limited} == {2**30}


def test_older_torch_and_workspaces_concern_simulated_cases(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", 'batch_size = 8\ntorch_era = "1.10"\nworkspaces = false')
    cases = [planned.case for planned in loaded(tmp_path, text + '\n[measure]\nmeters = ["simulated", "cpu"]').cases()]

    assert {(case.meter, case.torch_era, case.workspaces) for case in cases} == {
        ("simulated", "1.10", False),
        ("cpu", None, True),
    }


def test_what_differs_in_the_era_alone_is_measured_once(tmp_path: Path) -> None:
    text = RECIPE.replace("batch_size = 8", 'batch_size = 8\ntorch_era = ["1.10", "none"]')
    cases = [planned.case for planned in loaded(tmp_path, text + '\n[measure]\nmeters = ["simulated", "cpu"]').cases()]

    assert [(case.meter, case.torch_era) for case in cases if case.scheme == "exact"] == [
        ("simulated", "1.10"),
        ("cpu", None),
        ("simulated", None),
    ]
