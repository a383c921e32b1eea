"""Sweeps and fits on a real cluster of several nodes on this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Failure
from actbench.report import kinds, store
from actbench.tools.fit.records import FitRecord

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")  # whose import takes a second
pytestmark = [pytest.mark.xdist_group("cluster"), needs_ray]

HOST = """
import os
import sys
os.environ["RAY_worker_niceness"] = "0"  # as that of processes without a cluster
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
nodes = [cluster.add_node(**small) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""
OWN = """
    import os
    from torch import nn, randn

    def build():
        return nn.Linear(8, 8), lambda n: {"x": randn(n, 8)}, lambda model, batch: model(batch["x"]).sum()

    def leaves():
        os._exit(7)
"""
GRID = ["tiny-bert", *(part for spec in ("fewbit:3", "checkpoint", "gact:L2") for part in ("-s", spec)), "-b", "1-3+1"]
ROWS = 4 * 3


class Host:
    """A cluster of three nodes of one core each, in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._said()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def remove_node(self) -> None:
        """Kill one of the nodes that are not the head."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._said() == "removed"

    def close(self) -> None:
        """End all nodes."""
        self._process.communicate()


@pytest.fixture
def host() -> Any:
    made = Host()
    yield made
    made.close()


def started(folder: Path, *arguments: object, verb: str = "sweep") -> subprocess.Popen[str]:
    """Start a sweep, or what another verb does, in a folder."""
    command = [sys.executable, "-m", "actbench", verb, *map(str, arguments)]
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def records_in(folder: Path) -> tuple[MeasuredRecord, ...]:
    [file] = kinds.files_below(folder)
    return store.read_results(file).records


def rows_in(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.exhaustive
def test_a_node_that_is_killed_loses_and_repeats_nothing(host: Host, tmp_path: Path) -> None:
    whole, alone = tmp_path / "cluster.jsonl", tmp_path / "alone"
    sweep = started(tmp_path, *GRID, "-o", whole, "--cluster", host.address)
    while rows_in(whole) < 4 and sweep.poll() is None:
        time.sleep(0.1)
    host.remove_node()
    out, err = sweep.communicate()
    assert sweep.returncode == 0, out + err
    beside = started(tmp_path, *GRID, "-o", alone)
    out, err = beside.communicate()
    assert beside.returncode == 0, out + err

    there = {record.case: record.outcome for record in store.read_results(whole).records}
    here = {record.case: record.outcome for record in records_in(alone)}
    assert rows_in(whole) == len(there) == ROWS
    assert there == here


@pytest.mark.exhaustive
def test_a_driver_that_is_killed_goes_on_where_it_was(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sweep = started(tmp_path, *GRID, "-o", file, "--cluster", host.address)
    while rows_in(file) < 3 and sweep.poll() is None:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate()
    before = file.read_text()
    again = started(tmp_path, *GRID, "-o", file, "--cluster", host.address)
    out, err = again.communicate()

    assert again.returncode == 0, out + err
    assert file.read_text().startswith(before)
    assert rows_in(file) == len(store.read_results(file).records) == ROWS


@pytest.mark.exhaustive
def test_files_travel_and_a_case_that_ends_its_process_is_a_row(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    for function, status in (("build", 0), ("leaves", 1)):
        sweep = started(
            tmp_path, f"own.py:{function}", "-s", "exact", "-b", "2", "-o", function, "--cluster", host.address
        )
        out, err = sweep.communicate()
        assert sweep.returncode == status, out + err
    [built], [left] = records_in(tmp_path / "build"), records_in(tmp_path / "leaves")

    assert isinstance(built.outcome, Measurement)
    assert isinstance(left.outcome, Failure)
    assert left.outcome.reason == "crash"
    assert "exit" in left.outcome.message


@pytest.mark.exhaustive
def test_a_fit_on_nodes_simulates_and_finds_what_one_machine_does(host: Host, tmp_path: Path) -> None:
    among = [part for spec in ("checkpoint", "gact:L2", "chunked_loss:8", "adam8bit") for part in ("-s", spec)]
    step = ("tiny-llama", "--device-profile", "rtx-4090", "-b", 16, "--sequence-length", 64, "--memory-limit", "10MiB")
    flags = (*step, *among, "--budget", 3600, "--jobs", 2)
    found = []
    for name, more in (("there", ["--cluster", host.address]), ("here", [])):
        fit = started(tmp_path, *flags, "-o", tmp_path / f"{name}.fit.jsonl", *more, verb="fit")
        out, err = fit.communicate()
        assert fit.returncode in (0, 1), out + err
        records = store.read_results(tmp_path / f"{name}.fit.jsonl", FitRecord).records
        found.append((out, {record.case: (record.outcome, record.training) for record in records}))

    assert len(found[0][1]) > 5
    assert found[0] == found[1]


VERBS = {
    "sweep": ("sweep", "tiny-roberta", "-s", "exact", "-b", "1", "--sequence-length", "8", "-o", "out"),
    "fit": (
        *("fit", "tiny-llama", "--device-profile", "rtx-4090", "-b", "1", "--sequence-length", "16"),
        *("-s", "checkpoint", "--jobs", "1", "--budget", "600"),
    ),
}


@pytest.mark.exhaustive
def test_no_node_runs_code_of_the_folder_that_a_command_is_typed_in(host: Host, witness: Path) -> None:
    script = Path(sys.executable).with_name("actbench")
    for arguments in VERBS.values():
        ended = subprocess.run([script, *arguments, "--cluster", host.address], capture_output=True, text=True)

        assert not witness.exists(), f"{witness.read_text()}.py ran: {ended.stderr}"
        assert ended.returncode == 0, ended.stdout + ended.stderr
