"""A package of a stranger's, installed in a folder, and command lines that find it there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def installed_in(folder: Path, entries: str, modules: Mapping[str, str], metadata: str = "") -> Run:
    """Install a package ``theirs`` with entry points and modules; return a function that runs actbench with it."""
    site = folder / "site"
    info = site / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n{metadata}")
    (info / "entry_points.txt").write_text(entries)
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "300"}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "actbench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment | variables, cwd=folder)

    return run


def left_out(text: str) -> dict[tuple[str, str], str]:
    """Return why each plug-in is left out, by group and name; nothing else may be told."""
    found = {}
    for line in text.splitlines():
        told = re.fullmatch(r"actbench: plug-in '(\w+)' \((\w+)\) of theirs 1\.0 is left out: (.*)", line)
        assert told is not None, line
        assert (told[2], told[1]) not in found, f"told twice: {line}"
        found[told[2], told[1]] = told[3]
    return found
