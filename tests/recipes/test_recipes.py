"""Every recipe that ships is one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actbench import experiment, recipe, schemes


@pytest.mark.parametrize("name", recipe.names())
def test_a_shipped_recipe_names_only_what_exists(name: str) -> None:
    planned = experiment.plan(recipe.load(name))

    assert planned
    assert recipe.load(name).title.endswith("?")
    assert {entry.case.scheme for entry in planned} >= {"exact"}


def test_the_smoke_recipe_knows_every_scheme() -> None:
    parts = {part for entry in recipe.load("smoke").cases() for part in entry.case.scheme.split("+")}
    found = {part.partition(":")[0].partition(",")[0] for part in parts}

    assert found == set(schemes.names())


@pytest.mark.slow
def test_the_smoke_recipe_runs_from_the_command_line(cli: Any, tmp_path: Path) -> None:
    ended = cli("sweep", "smoke", "--output", tmp_path, "--export-json", tmp_path / "records.json")
    again = cli("sweep", "smoke", "--output", tmp_path)

    assert ended.status == 0, ended.err
    assert "checkpoint" in ended.out
    assert "0 failed" in ended.err
    assert len(list((tmp_path / "smoke").glob("*.md"))) == 1
    assert again.status == 0
    assert "0 measured, 0 failed" in again.err
