from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Share = Callable[[int, list[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    """Return what runs jobs in some processes, one behind the other, and returns what the first one says of each."""

    def run(size: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("shared")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [
            sys.executable,
            str(Path(__file__).with_name("processes.py")),
            *map(str, (folder / "jobs.json", folder / "results.json")),
        ]
        shared = {**os.environ, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        told = [process.communicate(timeout=1200)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, "\n".join(told)
        found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
        return found

    return run
