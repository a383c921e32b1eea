"""Lines, files and functions of each room of the source, beside those of an earlier commit.

python benchmarks/sizes.py [REF]      REF: the latest tag, else FIRST; a REF that git lacks leaves its columns out
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

FIRST = "bd31d91f"
"""What to compare with while no release is tagged: the commit before decision 45."""


class Size(NamedTuple):
    """Size of a room."""

    lines: int
    files: int
    functions: int


def room_of(path: PurePosixPath) -> str:
    """Return the room of a file: a folder of the package, one below ``methods`` and ``tools``, or all tests.

    Modules beside the package, as the pytest plug-in, stand with the modules at its top.
    """
    if path.parts[0] == "tests":
        return "tests"
    inside = path.parts[2:]
    if len(inside) <= 1:
        return "(top)"
    return "/".join(inside[:2]) if inside[0] in ("methods", "tools") and len(inside) > 2 else inside[0]


def sizes(sources: Iterable[tuple[PurePosixPath, str]]) -> dict[str, Size]:
    """Return the size of each room of Python sources."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for path, text in sources:
        room = room_of(path)
        lines[room] += text.count("\n")
        files[room] += 1
        functions[room] += sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(text))
        )
    return {room: Size(lines[room], files[room], functions[room]) for room in sorted(files)}


def table(now: Mapping[str, Size], before: Mapping[str, Size]) -> str:
    """Return both sizes as a Markdown table, with the sums of the core, the methods, the tools and all source."""
    nothing = Size(0, 0, 0)
    groups = {
        "**core**": lambda room: room != "tests" and not room.startswith(("methods", "tools")),
        "**methods**": lambda room: room.startswith("methods"),
        "**tools**": lambda room: room.startswith("tools"),
        "**source**": lambda room: room != "tests",
    }

    def total(found: Mapping[str, Size], belongs: object) -> Size:
        assert callable(belongs)
        return Size(*map(sum, zip(nothing, *(size for room, size in found.items() if belongs(room)), strict=True)))

    rows = [(room, now.get(room, nothing), before.get(room, nothing)) for room in sorted({*now, *before})]
    rows += [(name, total(now, belongs), total(before, belongs)) for name, belongs in groups.items()]
    head = ["room", "lines", "files", "functions"] + (["lines before", "files", "functions"] if before else [])
    text = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for room, size, old in rows:
        numbers = [f"{number:,}" for number in (*size, *(old if before else ()))]
        text.append(f"| {' | '.join([room, *numbers])} |")
    return "\n".join(text)


def here() -> dict[str, Size]:
    """Return the sizes of what git knows in the current folder."""
    return sizes((path, open(path, encoding="utf-8").read()) for path in _paths("ls-files"))


def at(ref: str) -> dict[str, Size]:
    """Return the sizes at a commit; none if git lacks it."""
    try:
        paths = list(_paths("ls-tree", "-r", "--name-only", ref))
    except subprocess.CalledProcessError:
        return {}
    with subprocess.Popen(["git", "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as git:
        assert git.stdin is not None
        assert git.stdout is not None
        found = []
        for path in paths:
            git.stdin.write(f"{ref}:{path}\n".encode())
            git.stdin.flush()
            found.append((path, git.stdout.read(int(git.stdout.readline().split()[2])).decode()))
            git.stdout.readline()
    return sizes(found)


def _paths(*command: str) -> Iterable[PurePosixPath]:
    listed = subprocess.run(["git", *command, "--", "src", "tests"], capture_output=True, text=True, check=True).stdout
    paths = map(PurePosixPath, listed.splitlines())
    return [path for path in paths if path.suffix == ".py" and path.parts[:2] != ("src", "actbench.egg-info")]


def _last_release() -> str:
    found = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or FIRST


if __name__ == "__main__":
    print(table(here(), at(sys.argv[1] if len(sys.argv) > 1 else _last_release())))
