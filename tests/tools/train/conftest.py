from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Together = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Return what trains jobs in two processes, one behind the other, and returns what the first one says of each."""

    def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("together")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            str(Path(__file__).with_name("ranks.py")),
            *map(str, (folder / "jobs.json", folder / "results.json")),
        ]
        processes = [
            subprocess.Popen(
                command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        told = [process.communicate(timeout=900)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
        found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
        return found

    return run
