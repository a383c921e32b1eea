"""Pages show what their commands print."""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FIGURE = re.compile(
    r"^```\n(actbench .*?)^```\n(?:\n!\[[^\]]*\]\((docs/images/\w+\.svg)\)|.*?^```\n(.*?)^```)",
    re.MULTILINE | re.DOTALL,
)
"""A command, and the picture that follows it or else the text of the next block."""

_LETTERS = re.compile(r'<text class="[\w-]+" x="[\d.]+" y="([\d.]+)"[^>]*>([^<]*)</text>')


def lines_drawn(picture: Path) -> str:
    """Return the text of a picture of a terminal, in which each piece stands at the height of its line."""
    lines: dict[str, str] = {}
    for height, letters in _LETTERS.findall(picture.read_text(encoding="utf-8")):
        lines[height] = f"{lines.get(height, '')} {html.unescape(letters)}"
    return "".join(f"{line}\n" for line in lines.values())


def mark_of(page: str, verb: str) -> pytest.MarkDecorator:
    """README's run is a slow test; what takes longer, and other pages' commands, are exhaustive."""
    return pytest.mark.slow if page == "README.md" and verb == "run" else pytest.mark.exhaustive


TUTORIALS = [f"docs/tutorials/{file.name}" for file in sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
FIGURES = [
    pytest.param(
        page,
        shlex.split(command.replace("\\\n", " ")),
        shown,
        id=f"{page} {place} {command.split()[1]}",
        marks=mark_of(page, command.split()[1]),
    )
    for page in ("README.md", "docs/run.md", "docs/questions.md", *TUTORIALS)
    for place, (command, picture, text) in enumerate(_FIGURE.findall((ROOT / page).read_text(encoding="utf-8")), 1)
    if not (shown := lines_drawn(ROOT / picture) if picture else text).startswith("actbench ")
]


def test_the_readme_shows_three_commands_and_the_questions_ten() -> None:
    named = [str(case.id) for case in FIGURES]

    assert [name for name in named if name.startswith("README")] == [
        "README.md 1 run",
        "README.md 2 measure",
        "README.md 3 fit",
    ]
    assert sum(name.startswith("docs/questions") for name in named) == 10


def extra_packages(page: str = "") -> set[str]:
    """Return the packages of actbench's extras, as Python imports them, but those that the text of a page installs."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = [text for extra in re.findall(r'pip install "actbench\[(\w+)\]', page) for text in tables.pop(extra)]
    needed = [text for each in asked for text in requires(_named(each)) or () if "extra ==" not in text]
    names = {_named(text) for each in tables.values() for text in each} - {"actbench", *map(_named, needed)}
    return {name.replace("-", "_") for name in names} | {"sklearn", "vl_convert", "cupy"}


def _named(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def plainly_installed(tmp_path: Path, page: str = "") -> dict[str, str]:
    """Return the environment of processes as after a plain ``pip install``, and what the text of a page installs."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING.format(hidden=extra_packages(page)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


HIDING = """
import sys
import tomllib
from importlib.machinery import PathFinder

class Plain(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Plain if each is PathFinder else each for each in sys.meta_path]
"""


def test_a_plain_installation_has_no_package_of_an_extra(tmp_path: Path) -> None:
    asked = "import importlib.util as u; print([n for n in ('bitsandbytes', 'torchao', 'numpy') if u.find_spec(n)])"
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, env=plainly_installed(tmp_path))

    assert done.stdout == "['numpy']\n", done.stderr


@pytest.mark.slow
def test_a_loop_on_a_page_prints_what_the_page_says() -> None:
    page = (ROOT / "docs/run.md").read_text(encoding="utf-8")
    code, told = re.findall(r"```python\n(.*?)```\n+prints (.*?)\n\nThe loop", page, re.DOTALL)[0]
    peak, shown = told.split(" ", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()

    assert printed[0] == peak
    assert set(re.findall(r"^\|.*$", shown, re.MULTILINE)) <= set(printed)


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_code_of_a_tutorial_runs(page: str, tmp_path: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert code
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(code), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "each prints one line"


@pytest.mark.parametrize(("page", "words", "shown"), FIGURES)
def test_pages_show_what_commands_print(page: str, words: list[str], shown: str, tmp_path: Path) -> None:
    environment = plainly_installed(tmp_path, (ROOT / page).read_text(encoding="utf-8"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    patience = ["--budget", "3600"] if words[1] == "fit" else []  # a slow machine plans no worse, only longer
    command = [sys.executable, "-m", *words, *patience]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    printed = iter([" ".join(line.split()) for line in done.stdout.splitlines()])
    if "a simulation takes more than" in done.stdout:  # on a slow machine
        shown = "".join(line for line in shown.splitlines(keepends=True) if not line.startswith("With "))

    for line in shown.splitlines():
        words = " ".join(line.split())
        assert words in ("", "…") or words in printed, f"not printed, or not in this order: {line}"
