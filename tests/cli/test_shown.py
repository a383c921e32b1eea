"""Pages show what their commands print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FIGURE = re.compile(r"^```\n(actbench .*?)^```\n.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
FIGURES = [
    pytest.param(shlex.split(command.replace("\\\n", " ")), shown, id=f"{page} {place} {command.split()[1]}")
    for page in ("README.md", "docs/run.md", "docs/questions.md")
    for place, (command, shown) in enumerate(_FIGURE.findall((ROOT / page).read_text(encoding="utf-8")), 1)
    if not shown.startswith("actbench ")
]


def test_the_readme_shows_three_commands_and_the_questions_ten() -> None:
    named = [str(case.id) for case in FIGURES]

    assert [name for name in named if name.startswith("README")] == [
        "README.md 1 run",
        "README.md 2 measure",
        "README.md 3 fit",
    ]
    assert sum(name.startswith("docs/questions") for name in named) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("words", "shown"), FIGURES)
def test_pages_show_what_commands_print(words: list[str], shown: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    patience = ["--budget", "3600"] if words[1] == "fit" else []  # a slow machine plans no worse, only longer
    command = [sys.executable, "-m", *words, *patience]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=dict(os.environ))
    printed = [line.strip() for line in done.stdout.splitlines()]

    for line in shown.splitlines():
        assert line.strip() in ("", "…", *printed)
