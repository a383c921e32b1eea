"""A sweep of the cases of fakebench by several launched processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from actbench.tools.ranks import launch, team as teams
from actbench.measuring.rank import launched_rank
from actbench.tools.ranks.follower import Follower
from actbench.tools.ranks.rendezvous import following, leading
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan
from actbench.report import store
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
teams._ENDING_SECONDS = 3.0
folder = Path(sys.argv[2])
place, address = launched_rank(os.environ), launch.address(os.environ)
if not place.is_first:
    with following(place, address) as frames, Follower(frames) as follower:
        follower.follow()
    sys.exit(0)
schemes = json.loads(sys.argv[3])
plan = [Planned(Case(model=str(folder / "log"), scheme=s, batch_size=4, meter="cpu", min_seconds=0.0)) for s in schemes]
needed = lambda case: 1 if case.scheme == "exact" else 3 if "three" in case.scheme else place.size
stored = store.Store.opened(folder / "results.jsonl", MeasuredRecord)
with leading(place, address, "fakebench") as team, stored as results:
    settings = {"recipe": "test", "command": "test", "bench": "fakebench", "preload": (), "timeout_seconds": 20}
    run_plan(plan, results, machines=team, needed=needed, **settings)
"""
RUNNER = str(Path(__file__).parents[2] / "run")

Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Give what starts the processes of a sweep of schemes, the first one first; they are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(schemes: str, size: int = 2) -> list[subprocess.Popen[str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, RUNNER, str(tmp_path), schemes],
                    env={**os.environ, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def nothing_left(tmp_path: Path) -> Callable[[], None]:
    """Give what fails where a process of the sweep is alive some seconds later."""

    def check() -> None:
        deadline = time.monotonic() + 20
        while left := [process for process in psutil.process_iter() if _belongs(process, tmp_path)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    return check


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        about_us = any(str(folder) in argument for argument in process.cmdline())
        return about_us and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
