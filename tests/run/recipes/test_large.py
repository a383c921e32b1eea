"""Grids of many cases: told in words where they are too many, and made without comparing each with each."""

from __future__ import annotations

from pathlib import Path

import pytest

from actbench.errors import RecipeError
from actbench.model.records import Case
from actbench.run import recipes, runner
from actbench.run.recipes.sections import Planned, _distinct
from actbench.tools.train import recipe as runs

GRID = 'title = "?"\n[workload]\nmodel = "tiny"\nbatch_size = "1-1000+1"\nsequence_length = [8, 16]\n'


def test_a_recipe_of_a_million_cases_is_refused_before_they_are_made(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text(GRID + f"[measure]\nseed = {list(range(250))}\n[[scheme]]\nspec = 'fewbit:3'\n")

    with pytest.raises(RecipeError, match=r"the recipe spans 1,000,000 cases and may span 100,000: give fewer"):
        recipes.load(str(path))


def test_a_recipe_of_too_many_training_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.train.toml"
    path.write_text(
        'title = "?"\n[train]\nmodel = "tiny-vit"\ndata = "digits"\nbatch_size = 8\nsteps = 1\nlearning_rate = 0.1\n'
        'optimizer = "sgd"\n'
        f"seeds = {list(range(60_000))}\n[[scheme]]\nspec = 'fewbit:3'\n"
    )

    with pytest.raises(RecipeError, match=r"the recipe spans 120,000 training runs and may span 100,000"):
        runs.load(str(path))


def test_values_of_an_axis_are_not_compared_each_with_each() -> None:
    compared = 0

    class Value:
        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return hash(self.number)

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return isinstance(other, Value) and self.number == other.number

    _distinct(tuple(Value(number) for number in range(1000)))

    assert compared < 1000


def test_what_is_done_is_not_searched_for_among_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    equal = Case.__eq__

    def counting(self: Case, other: object) -> bool:
        nonlocal compared
        compared += 1
        return bool(equal(self, other))

    class Full:
        path = None

        def done(self, key: str) -> bool:
            return True

        def append(self, record: object) -> None:
            raise AssertionError("nothing is left to measure")

    monkeypatch.setattr(Case, "__eq__", counting)
    cases = [Planned(Case(model="tiny", batch_size=size)) for size in range(1, 301)]
    summary = runner.run_plan(cases, Full(), recipe="large", command="actbench sweep large")

    assert summary.skipped == 300
    assert compared < 300
