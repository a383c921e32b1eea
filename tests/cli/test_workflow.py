"""The workflow that users copy: its commands run, and the gate holds."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW = Path(__file__).parents[2] / "examples" / "workflows" / "memory.yml"


@pytest.mark.usefixtures("made_up", "users_folder")
def test_the_commands_of_the_workflow_run(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    for name, value in {**job["env"], "RUNNER_TEMP": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    commands = [shlex.split(os.path.expandvars(line))[1:] for line in lines if line.startswith("actbench ")]
    ended = [cli(*words) for words in commands]

    assert [words[0] for words in commands] == ["measure", "measure", "compare"]
    assert [each.status for each in ended] == [0, 0, 0], ended
    assert [each.err for each in ended if "ACTBENCH_" in each.err] == []
    assert "rtx-4090" in (tmp_path / "after.jsonl").read_text(encoding="utf-8")
    assert "::error" not in ended[-1].out
    assert (Path("memory.md").is_file(), Path("memory.xml").is_file()) == (True, True)
