"""The page of the Python API names each public name, and its examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import actbench

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_public_name_is_documented() -> None:
    documented = set(re.findall(r"^::: actbench\.(\w+)$", PAGE, re.MULTILINE))

    assert documented == {*actbench.__all__, "optim"} - {"__version__"}


@pytest.mark.exhaustive
def test_the_examples_run(tmp_path: Path) -> None:
    script = tmp_path / "examples.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ))

    assert done.returncode == 0, done.stderr
    assert "fewbit:3 ['1']" in done.stdout
    assert "checkpoint" in done.stdout  # the plan that was found
    assert "did you mean 'fewbit'?" in done.stdout
