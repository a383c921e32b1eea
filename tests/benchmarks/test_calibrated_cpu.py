"""The table of calibrated estimates: every scheme has a row, and what is said of the rows is true."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from actbench.model.records import Case
from actbench.run.recipes.recipe import Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "calibrated-time.md").read_text()


def row(script: Any, measured: float, slowed: float, estimated: float) -> Any:
    return script.Row(Case(model="m", batch_size=2, meter="cpu"), measured, slowed, estimated)


def test_every_scheme_of_the_recipe_is_run_on_some_model(script: Any) -> None:
    asked = {each.case.scheme for each in Recipe.load(script.TURNS).cases()}
    models = script.grouped("", [], every=False)

    assert asked <= {case.scheme for cases in models.values() for case in cases}
    assert all(cases[0].scheme == "exact" for cases in models.values())
    assert {case.meter for cases in models.values() for case in cases} == {"cpu"}


def test_an_estimate_is_compared_with_an_undisturbed_processor(script: Any) -> None:
    found = row(script, measured=3.0, slowed=1.5, estimated=1.8)

    assert found.off == pytest.approx(-0.4)
    assert found.off_by_yardstick == pytest.approx(-0.1)


def test_the_summary_names_the_mean_and_the_worst(script: Any) -> None:
    told = script.summary([row(script, 1.0, 2.0, 1.1), row(script, 1.0, 1.0, 0.6)])

    assert "2 rows, off by 25.0 % in the mean, 40.0 % at worst, 1 beyond 30 %" in told
    assert "by the yardstick 80.0 % in the mean, 120.0 % at worst, 2 beyond 30 %" in told


@pytest.mark.parametrize(("column", "half"), [(5, 0), (7, 1)])
def test_what_the_page_says_of_all_is_so(column: int, half: int) -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and " % |" in line]
    off = [abs(float(cells[column].rstrip(" %"))) for cells in rows]
    told = next(line for line in PAGE.splitlines() if line.startswith("- all:")).split("; by the yardstick")

    numbers = (float(word) for word in told[half].replace("%", "").split() if _is_number(word))
    average, worst, beyond, _ = list(numbers)[-4:]
    assert told[0].startswith(f"- all: {len(rows)} rows")
    assert average == pytest.approx(mean(off), abs=0.1)
    assert worst == pytest.approx(max(off), abs=0.1)
    assert beyond == sum(each > 30 for each in off)


def _is_number(word: str) -> bool:
    return word.replace(".", "").isdigit()
