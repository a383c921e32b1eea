"""Every training recipe that ships is one that runs."""

from __future__ import annotations

import pytest

from actbench.tools.train import comparison, recipe as runs


@pytest.mark.parametrize("name", runs.names())
def test_a_shipped_training_recipe_names_only_what_goes_together(name: str) -> None:
    planned = comparison.plan(runs.load(name))

    assert {run.case.scheme for run in planned} >= {"exact"}
    assert {run.case.seed for run in planned} >= {0, 1, 2}
