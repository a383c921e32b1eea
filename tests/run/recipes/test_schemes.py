"""The schemes of a recipe: their order, models, meters, labels and published figures, and one added after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from writtenrecipes import RECIPE, loaded

from actbench.errors import RecipeError
from actbench.run.recipes import Recipe


def test_exact_stays_where_its_author_put_it(tmp_path: Path) -> None:
    found = loaded(tmp_path, RECIPE + '[[scheme]]\nspec = "fewbit:3"\n[[scheme]]\nspec = "exact"\n')

    assert [planned.case.scheme for planned in found.cases()] == ["fewbit:3", "exact"]


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


@pytest.mark.parametrize(
    ("columns", "flags", "more"),
    [
        ("peak", {}, ()),
        ("peak", {"measure": {"largest_batch": True}}, ("largest-batch",)),
        ("peak,largest-batch", {"measure": {"largest_batch": True}}, ()),
        ("peak", {"measure": {"memory_limit": "1GiB", "largest_batch": True}}, ("largest-batch", "over-limit")),
        ("scheme,peak", {"workload": {"batch_size": "1,2"}}, ("batch",)),
        ("peak", {"workload": {"batch_size": "1,2"}}, ()),
        ("scheme,peak", {"measure": {"meters": ["cpu", "simulated"]}}, ("meter",)),
        ("", {"measure": {"largest_batch": True}}, ()),
    ],
)
def test_columns_that_a_flag_asks_for_are_shown_beside_those_of_the_recipe(
    tmp_path: Path, columns: str, flags: dict[str, Any], more: tuple[str, ...]
) -> None:
    found = loaded(tmp_path, f'columns = "{columns}"\n{RECIPE}').with_flags(**flags)

    assert found.shown_columns == (*filter(None, columns.split(",")), *more)


def test_a_stack_of_schemes_shows_what_each_of_them_changes(tmp_path: Path) -> None:
    head, tail = STACK.split("[[scheme]]", 1)
    found = loaded(tmp_path, f"{RECIPE.replace('[workload]', f'{head}[workload]')}[[scheme]]{tail}")

    assert found.shown_columns == ("peak", "saved", "peak-vs-previous")


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
