"""The page of public scripts is what the results say, and each row is explained."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "public"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "scripts.py"))


def test_the_page_is_made_of_the_results(runner: dict[str, Any]) -> None:
    assert (ROOT / "docs" / "public-scripts.md").read_text() == "\n".join(runner["page"]()).rstrip() + "\n"


def test_results_are_of_scripts_of_the_tables_and_large_errors_have_reasons(runner: dict[str, Any]) -> None:
    for source, table in runner["sources"]().items():
        found = runner["results"](source)
        scripts = {script["name"]: script for script in table["script"] if "left_out" not in script}
        assert set(found) <= set(scripts)
        for name, result in found.items():
            off = runner["error"](scripts[name], result, "allocated")
            assert "failed" in result or abs(off or 0) <= runner["LARGE"] or scripts[name]["reason"]


def test_a_script_is_taken_from_the_log_that_begins_with_it(runner: dict[str, Any], tmp_path: Path) -> None:
    clones, folder = tmp_path / "clones", tmp_path / "run"
    (clones / "name").mkdir(parents=True)
    folder.mkdir()
    (clones / "name" / "log.txt").write_text(f"print(1)\n{'=' * 100}\nstep 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "log"]):
        subprocess.run(["git", *words], cwd=clones / "name", check=True)
    table = {"repository": "owner/name", "commit": "HEAD", "script_in_log": True, "folders": ["logs"]}

    git = runner["clone"](clones, table)
    target = runner["unpacked"](git, table, {"path": "log.txt"}, folder)

    assert (folder / target).read_text() == "print(1)\n"
    assert (folder / "logs").is_dir()


def test_a_source_without_a_clone_is_named(runner: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no clone of owner/name"):
        runner["clone"](tmp_path, {"repository": "owner/name"})
