"""The page of other estimators is what their committed answers say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "other-estimators.md").read_text()
RESULTS = json.loads((ROOT / "results" / "other-estimators.json").read_text())


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "other_estimators.py"))


def test_the_page_is_rendered_from_the_answers(table: dict[str, Any]) -> None:
    assert table["page"](RESULTS) == PAGE


def test_each_tool_answers_each_row_or_says_why_not(table: dict[str, Any]) -> None:
    assert [row["command"] for row in RESULTS["rows"]] == list(table["ROWS"])
    for row in RESULTS["rows"]:
        for tool in table["TOOLS"]:
            assert row[tool].get("bytes") or row[tool].get("cannot"), (tool, row["command"])
        assert row["actbench"]["bytes"]


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("tool", ["actbench", "MemTracker"])
def test_an_answer_is_what_the_tool_gives_now(
    tool: str, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    place = next(place for place, row in enumerate(RESULTS["rows"]) if row["command"].startswith("mobilenet_v2"))

    assert table["one"](tool, place)["bytes"] == pytest.approx(RESULTS["rows"][place][tool]["bytes"], rel=0.01)
