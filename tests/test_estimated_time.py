"""The committed table of estimated times is what the code gives today."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "estimated-time.md").read_text()
TABLES = tomllib.loads((ROOT / "benchmarks" / "published_times.toml").read_text())
PAIRS = TABLES["pair"]


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "estimated_time.py"))


@pytest.mark.parametrize("place", [19, *(pytest.param(place, marks=pytest.mark.exhaustive) for place in (2, 23, 63))])
def test_the_row_of_a_pair_is_what_is_estimated_now(table: dict[str, Any], place: int) -> None:
    assert table["row"](PAIRS[place]) in PAGE.splitlines()


def test_every_pair_has_its_row_and_a_source() -> None:
    rows = [line for line in PAGE.splitlines() if any(f"| {use} |" in line for use in ("fit", "check", "unseen"))]

    assert len(rows) == len(PAIRS) >= 12
    for pair, line in zip(PAIRS, rows, strict=True):
        assert line.startswith(f"| {pair['case']['model']} | {pair['case']['device_profile']} |")
        assert f"| {pair['use']} | {TABLES['sources'][pair['source']]} |" in line


def test_the_errors_that_are_told_are_those_of_the_rows(table: dict[str, Any]) -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if " % | " in line]
    speeds = [
        pair["published"] * (1 + float(cells[6].rstrip(" %")) / 100) for pair, cells in zip(PAIRS, rows, strict=True)
    ]
    told = [line for line in PAGE.splitlines() if line.startswith("- ")]

    for line, again in zip(told, table["summary"](PAIRS, speeds).splitlines(), strict=True):
        assert _numbers(line) == pytest.approx(_numbers(again), abs=0.15)


def _numbers(line: str) -> list[float]:
    return [float(word) for word in line.split() if word.replace(".", "").isdigit()]
