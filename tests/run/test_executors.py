"""One contract for all executors: processes of this machine, launched ranks, nodes of a real Ray cluster.

Each sweeps cases of fakebench in a process of its own, which may be killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from actbench.machine import machine
from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Failure
from actbench.report import store

PROGRAM = """
import json, os, signal, sys
from contextlib import nullcontext
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
kind, folder, benches, asked = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
sys.path[:0] = [benches, str(folder)]
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan
from actbench.measuring.rank import launched_rank
from actbench.report import store
from actbench.model.measured import MeasuredRecord
from actbench.model.records import Case
machines = nullcontext()
if kind == "ranks":
    from actbench.tools.ranks.follower import Follower
    from actbench.tools.ranks.rendezvous import following, leading
    from actbench.tools.ranks.launch import address
    here = launched_rank(os.environ)
    if not here.is_first:
        with following(here, address(os.environ)) as frames, Follower(frames) as follower:
            follower.follow()
        sys.exit(0)
    machines = leading(here, address(os.environ), "fakebench")
elif kind != "local":
    from actbench.tools.cluster import node
    from actbench.tools.cluster.executor import Cluster
    node.files_of = lambda cases: {}  # the schemes of fakebench are none that name files
    machines = nullcontext(Cluster(kind))
settings = dict(model=str(folder / "log"), batch_size=4, min_steps=10, min_seconds=0.0)
plan = [Planned(Case(**{**settings, **case})) for case in asked]
stored = store.Store.opened(folder / "results.jsonl", MeasuredRecord)
spread = lambda case: 2 if kind == "ranks" and case.scheme != "exact" else 1
with machines as found, stored as results:
    run_plan(plan, results, recipe="test", command="test", bench="fakebench", preload=(), timeout_seconds=8.0,
        machines=found, needed=spread, jobs=2)
"""
HOST = """
import sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
cluster.add_node(**small)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
BENCHES = str(Path(__file__).parent)


class Sweeps:
    """Sweeps by one executor, whose rows and log lie in a folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *cases: dict[str, Any]) -> subprocess.Popen[str]:
        """Start the processes of a sweep and return the first, which decides."""
        launched: list[dict[str, str]] = [{}]
        if self.kind == "ranks":
            with socket.create_server(("127.0.0.1", 0)) as free:
                common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            launched = [{**common, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} for rank in "01"]
        command = [sys.executable, "-c", PROGRAM, self.kind, str(self.folder), BENCHES, json.dumps(cases)]
        pipe = subprocess.PIPE
        begun = [subprocess.Popen(command, env={**os.environ, **own}, stderr=pipe, text=True) for own in launched]
        self.started += begun
        return begun[0]

    def finish(self, *cases: dict[str, Any]) -> dict[tuple[str, str], MeasuredRecord]:
        """Sweep, and return the records by scheme and meter."""
        process = self.start(*cases)
        _, said = process.communicate(timeout=280)
        assert process.returncode == 0, said
        return self.rows()

    def rows(self) -> dict[tuple[str, str], MeasuredRecord]:
        found = store.read_results(self.folder / "results.jsonl").records
        return {(record.case.scheme, record.case.meter): record for record in found}

    def lines(self) -> list[str]:
        file = self.folder / "results.jsonl"
        return file.read_text().splitlines() if file.exists() else []

    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text() if file.exists() else ""

    def wait_for(self, came: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not came():
            assert time.monotonic() < deadline, f"it does not come: {self.log()}"
            time.sleep(0.01)

    def assert_no_process_is_left(self) -> None:
        """Fail where a process of a sweep, or of a case, is alive some seconds later."""
        deadline = time.monotonic() + 30
        while left := [process for process in psutil.process_iter() if self._owns(process)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            is_ours = any(str(self.folder) in argument for argument in process.cmdline())
            return is_ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Return the address of a cluster of two nodes of one core on this machine, which find fakebench."""
    environment = {**os.environ, "PYTHONPATH": BENCHES}
    pipe: Any = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=pipe, stdout=pipe, text=True, env=environment) as host:
        assert host.stdout is not None
        yield host.stdout.readline().strip()
        host.communicate()


CLUSTER = pytest.mark.xdist_group("cluster")
NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


@pytest.fixture(
    params=[
        "local",
        pytest.param("ranks", marks=[pytest.mark.exhaustive, CLUSTER]),
        pytest.param("ray", marks=[pytest.mark.slow, CLUSTER, NEEDS_RAY]),
    ]
)
def sweeps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sweeps]:
    kind = request.getfixturevalue("ray_address") if request.param == "ray" else request.param
    made = Sweeps(kind, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def of(meter: str, *schemes: str, **settings: Any) -> Sequence[dict[str, Any]]:
    return [{"scheme": scheme, "meter": meter, **settings} for scheme in schemes]


ENDINGS = {
    "kill": ("crash", "SIGKILL"),
    "exit:3": ("crash", "exit code 3"),
    "bug": ("crash", "ValueError: a bug"),
    "garble:x": ("crash", "something else than an answer"),
    "oom": ("out-of-memory", "too much"),
    "hog": ("out-of-memory", "MemoryError"),
    "missing": ("unavailable", "no such device"),
    "hang": ("timeout", "worked for longer than --timeout 8 s and was stopped while its memory was read"),
    "name:a+then+kill": ("crash", "SIGKILL"),
}


def test_a_case_that_dies_hangs_or_runs_out_of_memory_is_a_row_and_the_others_go_on(sweeps: Sweeps) -> None:
    rows = sweeps.finish(*of("cpu", "exact", *ENDINGS, "name:b"), *of("simulated", "exact", "kill", "oom"))

    for scheme, (reason, words) in ENDINGS.items():
        outcome = rows[scheme, "cpu"].outcome
        assert isinstance(outcome, Failure), scheme
        assert (scheme, outcome.reason) == (scheme, reason)
        assert words in outcome.message
    for scheme in ("kill", "oom"):
        outcome = rows[scheme, "simulated"].outcome
        assert isinstance(outcome, Failure)
        assert outcome.reason == ENDINGS[scheme][0]
    exact, other, simulated = (
        rows[key].outcome for key in (("exact", "cpu"), ("name:b", "cpu"), ("exact", "simulated"))
    )
    assert isinstance(exact, Measurement)
    assert isinstance(other, Measurement)
    assert isinstance(simulated, Measurement)
    assert exact.timing_round == other.timing_round != simulated.timing_round
    assert len(exact.step_seconds) == len(other.step_seconds) == 10
    assert {(record.machine, record.command) for record in rows.values()} == {(machine(), "test")}
    sweeps.assert_no_process_is_left()


def test_the_largest_batch_is_predicted_and_proved(sweeps: Sweeps) -> None:
    limited = {"find_largest_batch": True, "memory_limit_bytes": 1725}
    rows = sweeps.finish(
        *of("cpu", "exact", "name:a+strict", **limited, batch_size=128), *of("simulated", "exact", **limited)
    )

    measured, strict, simulated = (
        rows[key].outcome for key in (("exact", "cpu"), ("name:a+strict", "cpu"), ("exact", "simulated"))
    )
    assert isinstance(measured, Measurement)
    assert isinstance(simulated, Measurement)
    assert isinstance(strict, Failure)
    assert measured.largest_batch == simulated.largest_batch == 72
    assert strict.message.endswith("the largest batch that fits is 72")
    assert "exact 73 trial" in sweeps.log()


def test_a_sweep_that_is_killed_leaves_no_process_and_goes_on_where_it_was(sweeps: Sweeps) -> None:
    names = [f"name:{name}+sleep:0.3" for name in "abcdef"]
    plan = [*of("simulated", *names), *of("cpu", "exact", *names[:2])]
    process = sweeps.start(*plan)
    sweeps.wait_for(lambda: len(sweeps.lines()) >= 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for follower in sweeps.started[1:]:
        follower.communicate(timeout=60)
    sweeps.assert_no_process_is_left()
    before = sweeps.lines()
    rows = sweeps.finish(*plan)

    assert sweeps.lines()[: len(before)] == before
    assert len(sweeps.lines()) == len(rows) == len(plan)
    assert all(isinstance(record.outcome, Measurement) for record in rows.values())


def test_ctrl_c_keeps_the_rows_and_leaves_no_process(sweeps: Sweeps) -> None:
    process = sweeps.start(*of("simulated", "exact", "name:a"), *of("cpu", "hang"))
    sweeps.wait_for(lambda: "hang 4 begin" in sweeps.log())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in said
    sweeps.assert_no_process_is_left()
    assert rows_of(sweeps) == {"exact", "name:a"}


def rows_of(sweeps: Sweeps) -> set[str]:
    return {scheme for scheme, _ in sweeps.rows()}
