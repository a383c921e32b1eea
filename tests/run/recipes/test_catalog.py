from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from actbench.errors import RecipeError
from actbench.run import recipes
from actbench.run.recipes.files import SWEEPS, TRAININGS
from actbench.tools.train import recipe as runs


@pytest.mark.parametrize(
    ("load", "name", "told"),
    [
        (runs.load, "quickstart", "quickstart is a recipe of 'actbench sweep': run 'actbench sweep quickstart'"),
        (recipes.load, "digits", "digits is a recipe of 'actbench train': run 'actbench train digits'"),
        (recipes.source, "digits", "run 'actbench train digits'"),
    ],
)
def test_a_recipe_of_the_other_verb_says_so(load, name, told) -> None:
    with pytest.raises(RecipeError, match=told):
        load(name)


def test_a_file_for_the_other_verb_says_so(tmp_path: Path) -> None:
    trains, measures = tmp_path / "trains.toml", tmp_path / "measures.toml"
    trains.write_text(TRAININGS.source("digits"))
    measures.write_text(SWEEPS.source("quickstart"))

    for load, file, verb in ((recipes.load, trains, "train"), (runs.load, measures, "sweep")):
        with pytest.raises(
            RecipeError, match=f"^{file} is a recipe of 'actbench {verb}': run 'actbench {verb} {file}'$"
        ):
            load(file)


def pipe(path: Path) -> None:
    os.mkfifo(path)


WRONG = {
    "a pipe": (pipe, "the recipe cannot be read: it is not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "the recipe cannot be read: it is not a regular file"),
    "a folder": (Path.mkdir, "the recipe cannot be read: Is a directory"),
    "too large": (lambda path: path.write_bytes(b"#" * (2 << 20)), "the recipe cannot be read: it has more than"),
    "nested": (lambda path: path.write_text("a = " + "[" * 50_000), "not valid TOML: it is nested too deeply"),
    "long number": (lambda path: path.write_text("a = " + "1" * 5000), "not valid TOML: Exceeds the limit"),
}


@pytest.mark.parametrize(("make", "told"), WRONG.values(), ids=WRONG)
def test_what_is_no_readable_recipe_is_told_in_words(tmp_path: Path, make, told) -> None:
    path = tmp_path / "mine.toml"
    make(path)

    for load in (recipes.load, runs.load):
        with pytest.raises(RecipeError, match=told):
            load(path)


OWN = """
title = "?"
[workload]
model = {model}
batch_size = 1
{rest}
[[scheme]]
spec = "{scheme}"
"""
CODE = {
    "a model": ('"train.py:build"', "", "exact", "model train.py:build"),
    "a scheme": ('"tiny"', "", "fewbit:3,functions=act.py:mine", "scheme fewbit:3,functions=act.py:mine"),
    "a module": ('"tiny"', "", "encode:fp8:e4m3,on=evil.things:f", "scheme encode:fp8:e4m3,on=evil.things:f"),
    "a hub model": ('["org/a", "b"]', "trust_remote_code = true", "exact", "trust_remote_code of org/a, trust_remote"),
}


@pytest.mark.parametrize(("model", "rest", "scheme", "named"), CODE.values(), ids=CODE)
def test_a_recipe_that_names_code_is_run_only_when_it_is_trusted(tmp_path: Path, model, rest, scheme, named) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.format(model=model, rest=rest, scheme=scheme))

    with pytest.raises(RecipeError, match=rf"mine.toml: the recipe runs code: {re.escape(named)}.*--trust-recipe"):
        recipes.Recipe.load_to_run(path, trusted=False)
    assert recipes.Recipe.load_to_run(path, trusted=True) == recipes.load(path)


def test_what_ships_with_actbench_and_what_names_no_code_needs_no_trust(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.format(model='"tiny"', rest="trust_remote_code = false", scheme="fewbit:3"))

    assert recipes.Recipe.load_to_run(path, trusted=False).models == ("tiny",)
    for kind in (recipes.Recipe, runs.TrainingRecipe):
        for name in kind.files.names():
            assert kind.load_to_run(name, trusted=False).name == name


def test_the_verbs_ask_for_trust(cli, tmp_path: Path) -> None:
    path, witness = tmp_path / "mine.toml", tmp_path / "witness"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w')")
    path.write_text(OWN.format(model=f'"{tmp_path}/evil.py:build"', rest="", scheme="exact"))

    ended = cli("sweep", path, "--output", tmp_path / "out")

    assert ended.status == 2
    assert "--trust-recipe" in ended.err
    assert not witness.exists()
