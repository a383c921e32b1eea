"""Scripts as people write them run unchanged on a simulated card."""

from __future__ import annotations

import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, ScriptCase, Size

PROFILE = "h100-80gb"
ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples" / "train.py")


def run(command: list[str], folder: Path, *options: str) -> dict[str, Any]:
    """Run a script by ``actbench run`` and return its record."""
    file = folder / "found.json"
    words = ["run", "--device-profile", PROFILE, "--quiet", "--export-json", str(file), *options, *command]
    done = subprocess.run([sys.executable, "-m", "actbench", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())[0]
    return found


def check(case: ScriptCase, size: Size, command: Any, tmp_path: Path) -> None:
    gpus = case.processes if size == "tiny" else case.real_processes
    found = run(command(case, size), tmp_path, "--gpus", str(gpus))["outcome"]

    assert found["kind"] == "measured"
    assert not [text for text in found["warnings"] if "a card refuses that" in text]
    assert found["peak_bytes"] == sum(found["peak_parts"].values()) == found["timeline"]["peak_bytes"]
    assert found["reserved_bytes"] >= found["peak_bytes"]
    assert 0 < found["weights_bytes"] < found["peak_bytes"]
    assert any(".py:" in (holder["line"] or "") for holder in found["timeline"]["holders"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_each_script_runs_at_its_real_size(case: ScriptCase, command: Any, tmp_path: Path) -> None:
    check(case, "real", command, tmp_path)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    words = [EXAMPLE, "--batch-size", "2", "--context", "32", "--width", "64", "--depth", "1"]
    found = run(words, tmp_path)["outcome"]

    assert found["kind"] == "measured"
    assert found["built"]["batch_size"] == 2
    assert found["warnings"] == []
    assert any("train.py:" in (holder["line"] or "") for holder in found["timeline"]["holders"])
