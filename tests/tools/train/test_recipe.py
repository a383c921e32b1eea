from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import RecipeError, UsageError
from actbench.run import recipes
from actbench.tools.train import recipe as runs
from actbench.tools.train.recipe import parse_seeds

GOOD = """
title = "Which?"
[train]
model = "tiny-vit"
data = "digits"
batch_size = 8
steps = 4
optimizer = "sgd"
learning_rate = 0.1
seeds = [0, 1]
[[scheme]]
spec = "fewbit:3"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


def test_runs_go_round_the_seeds_with_the_exact_model_first(tmp_path: Path) -> None:
    found = runs.load(written(tmp_path, GOOD)).runs("cpu")

    assert [(run.case.seed, run.case.scheme) for run in found] == [
        (0, "exact"),
        (0, "fewbit:3"),
        (1, "exact"),
        (1, "fewbit:3"),
    ]
    assert {run.case.device for run in found} == {"cpu"}
    assert len({run.case.key() for run in found}) == 4


def test_flags_stand_in_place_of_the_recipe(tmp_path: Path) -> None:
    text = GOOD.replace("steps = 4", "epochs = 4")
    changed = runs.load(written(tmp_path, text)).with_flags({"steps": 7, "seeds": "2-4", "device": None}, ["smaq"])

    assert changed.train[0].steps == 7
    assert changed.train[0].epochs is None
    assert changed.train[0].seeds == (2, 3, 4)
    assert [row.spec for row in changed.scheme] == ["smaq"]


@pytest.mark.parametrize(
    ("flags", "schemes", "told"),
    [
        ({"seeds": "x"}, (), "--seeds: seeds 'x'"),
        ({"device": "gpu"}, (), "--device: 'gpu' is not one of"),
        ({}, ("fewbit:",), "--scheme: scheme 'fewbit:': nothing"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named_once(
    tmp_path: Path, flags: dict[str, str], schemes: tuple[str, ...], told: str
) -> None:
    section = GOOD[GOOD.index("[train]") : GOOD.index("[[scheme]]")].replace("[train]", "[[train]]")
    two = GOOD.replace("[train]", "[[train]]").replace(
        "[[scheme]]", section.replace("tiny-vit", "resnet") + "[[scheme]]"
    )

    with pytest.raises(RecipeError) as caught:
        runs.load(written(tmp_path, two)).with_flags(flags, schemes)

    assert str(caught.value).startswith(f"command line: {told}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("was", "is_now", "told"),
    [
        ("batch_size = 8", "batchsize = 8", "did you mean 'batch_size'"),
        ("steps = 4", "", "either as epochs or as steps"),
        ("steps = 4", "steps = 4\nepochs = 1", "either as epochs or as steps"),
        ("steps = 4", "steps = 0", "train.steps"),
        ('"sgd"', '"adamw"\nmomentum = 0.9', "momentum is an option of sgd"),
        ('"sgd"', '"lion"', "'lion' is not one of"),
        ("learning_rate = 0.1", "learning_rate = 0.1\ngamma = 0.5", "option of the schedule multi_step"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "is given twice"),
        ("seeds = [0, 1]", 'seeds = "4-2"', "nor a range"),
        ('spec = "fewbit:3"', 'spec = "fewbit:3"\n[[scheme]]\nspec = "fewbit:3"', "the same run is given twice"),
        ('spec = "fewbit:3"', 'spec = "fewbit:3"\nmodels = ["other"]', "is not a model of this recipe"),
        ('spec = "fewbit:3"', 'spec = "fewbit:3"\nmeters = "cpu"', "a training run has no meter"),
    ],
)
def test_a_bad_recipe_is_refused_with_the_place(tmp_path: Path, was: str, is_now: str, told: str) -> None:
    file = written(tmp_path, GOOD.replace(was, is_now))

    with pytest.raises(RecipeError) as caught:
        runs.load(file)

    assert told in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_recipe_of_a_sweep_is_sent_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="actbench sweep"):
        runs.load(written(tmp_path, 'title = "x"\n[workload]\nmodel = "resnet18"\nbatch_size = 1\n'))


@pytest.mark.parametrize(("written_as", "means"), [("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")])
def test_autocast_has_short_names(tmp_path: Path, written_as: str, means: str) -> None:
    keys = f'autocast = "{written_as}"\nmax_grad_norm = 1\ngradient_accumulation = 4\nsteps = 4'
    case = runs.load(written(tmp_path, GOOD.replace("steps = 4", keys))).runs("cpu")[0].case

    assert (case.autocast, case.max_grad_norm, case.gradient_accumulation) == (means, 1.0, 4)
    assert (case.processes, case.strategy) == (1, "single")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('autocast = "fp8"', "autocast"),
        ("max_grad_norm = 0", "max_grad_norm"),
        ("gradient_accumulation = 9", "a batch of 8 has fewer parts"),
    ],
)
def test_values_that_cannot_be_are_told(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        runs.load(written(tmp_path, GOOD.replace("steps = 4", f"steps = 4\n{line}")))


def test_seeds_are_read_as_lists_and_ranges() -> None:
    assert parse_seeds("0-2,7") == (0, 1, 2, 7)
    with pytest.raises(UsageError, match="twice"):
        parse_seeds("0-2,1")


def test_shipped_recipes_of_both_kinds_are_kept_apart() -> None:
    assert "digits" in runs.names()
    assert not set(runs.names()) & set(recipes.names())
    assert all(runs.load(name).title.endswith("?") for name in runs.names())
