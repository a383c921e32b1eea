"""What a cluster costs, on several nodes of this machine, each of one core.

Ray must be installed (``actbench[cluster]``)::

    .venv/bin/python benchmarks/cluster_runs.py same --cases 200
    .venv/bin/python benchmarks/cluster_runs.py overhead --cases 200
    .venv/bin/python benchmarks/cluster_runs.py schedule --cases 10000

``same`` sweeps a small model, kills a node in the middle and compares rows with those of a sweep without a cluster.
``overhead`` compares with as many ``--jobs`` as the cluster has cores; cases sleep, so that they need no more cores
than there are. ``schedule`` hands over tasks that answer at once, and reads the driver's memory meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from actbench.model.measured import MeasuredRecord, Measurement
from actbench.model.records import Case, Failure
from actbench.report import store
from actbench.report.store import Store
from actbench.run.progress import Progress
from actbench.run.recipes.sections import Planned
from actbench.run.runner import run_plan
from actbench.tools.cluster import node
from actbench.tools.cluster.executor import Cluster

HOST = """
import os
import sys
os.environ["RAY_worker_niceness"] = "0"  # as that of processes without a cluster
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
nodes = [cluster.add_node(**small) for _ in range(int(sys.argv[1]) - 1)]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""
NODES = 3
SCHEMES = ("fewbit:3", "checkpoint", "gact:L2", "randomized:0.5")
ANSWER = Measurement(weights_bytes=1, activation_bytes=2, peak_bytes=3)


class Session:
    """As of ``actbench.measuring.bench``: a case that sleeps, so many milliseconds as its batch has rows."""

    def __init__(self, case: Case) -> None:
        self._seconds = case.batch_size / 1000

    def memory(self) -> Measurement:
        """Sleep."""
        time.sleep(self._seconds)
        return ANSWER

    def time(self, steps: int) -> None:
        """Say that there is no clock."""


def failure_of(error: BaseException) -> Failure:
    """Return what became of a case; as of ``actbench.measuring.bench``."""
    return Failure(reason="crash", message=str(error))


def answer(text: str, shared: str) -> str:
    """Answer on a node without measuring."""
    node.prepare(shared)
    outcomes = tuple((case, ANSWER) for case in node.Request.model_validate_json(text).cases)
    return node.CasesReply(outcomes=outcomes, **dict(node.here())).model_dump_json()


@contextmanager
def local_cluster(nodes: int = NODES) -> Iterator[tuple[str, Callable[[], None]]]:
    """Hold a cluster of nodes of one core each; give its address, and what kills one of them."""
    pipe: Any = subprocess.PIPE
    host = subprocess.Popen([sys.executable, "-c", HOST, str(nodes)], stdin=pipe, stdout=pipe, text=True)
    assert host.stdin is not None
    assert host.stdout is not None

    def kill(to: TextIO = host.stdin, said: TextIO = host.stdout) -> None:
        to.write("\n")
        to.flush()
        assert said.readline().strip() == "removed"

    try:
        yield host.stdout.readline().strip(), kill
    finally:
        host.communicate()


def plan(count: int, milliseconds: int = 1) -> list[Planned[Case]]:
    """Return simulated cases that differ in their seed."""
    return [
        Planned(Case(model="asleep", batch_size=milliseconds, meter="simulated", seed=seed)) for seed in range(count)
    ]


class Clock(Progress):
    """Notes when each case ended."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.ended: list[float] = []

    def finished(self, case: Any, outcome: Any) -> None:
        """Note it."""
        self.ended.append(time.monotonic() - self.began)


def overhead(count: int, seconds: float) -> None:
    """Run sleeping cases both ways."""
    cases = plan(count, round(1000 * seconds))
    least = count * seconds / NODES
    _import_schemes(cases)
    took = {}
    with local_cluster() as (address, _), tempfile.TemporaryDirectory() as folder:
        for name, machines in ((f"--jobs {NODES}", None), (f"--cluster, {NODES} nodes", Cluster(address))):
            clock = Clock()
            settings: dict[str, Any] = {"recipe": "asleep", "command": "", "bench": "cluster_runs", "jobs": NODES}
            with Store.opened(Path(folder) / f"{len(took)}.jsonl", MeasuredRecord) as rows:
                run_plan(cases, rows, progress=clock, machines=machines, **settings)
            took[name] = clock.ended
            first, last = clock.ended[0], clock.ended[-1]
            print(
                f"{name}: {last:.1f} s, the first row after {first:.1f} s, from then on {last - first:.1f} s; "
                f"sleeping alone {least:.1f} s"
            )
    alone, there = took.values()
    rest = (there[-1] - there[0]) / (alone[-1] - alone[0]) - 1
    print(f"overhead: {100 * (there[-1] / alone[-1] - 1):.1f} %; from the first row on {100 * rest:.1f} %")


def schedule(count: int) -> None:
    """Hand over many tasks that answer at once."""
    cases, process, sizes = plan(count), psutil.Process(), [(0, 0.0, psutil.Process().memory_info().rss)]

    class Sized(Clock):
        """Notes the size of this process, too."""

        def finished(self, case: Any, outcome: Any) -> None:
            """Note it, ten times."""
            super().finished(case, outcome)
            if len(self.ended) % (count // 10) == 0:
                sizes.append((len(self.ended), self.ended[-1], process.memory_info().rss))

    _import_schemes(cases)
    node.measure = answer
    with local_cluster() as (address, _), tempfile.TemporaryDirectory() as folder:
        rows = Store.opened(Path(folder) / "rows.jsonl", MeasuredRecord)
        with rows as stored:
            clock, used = Sized(), sum(process.cpu_times()[:2])
            run_plan(cases, stored, recipe="asleep", command="", progress=clock, machines=Cluster(address))
    used = sum(process.cpu_times()[:2]) - used
    print(f"{1000 * used / count:.2f} ms of the driver's processor time for each row")
    for number, seconds, size in sizes:
        print(f"{number:>7,} rows after {seconds:6.1f} s: the driver has {size / 2**20:.1f} MiB")


def _import_schemes(cases: Sequence[Planned[Case]]) -> None:
    """Import what a sweep has imported when it has checked its plan, on a cluster or not."""
    node.files_of([cases[0].case])


def same(count: int) -> None:
    """Sweep a small model, a node being killed half-way, and compare rows with those of a sweep without a cluster."""
    batches = count // (len(SCHEMES) + 1)
    grid = ["tiny-bert", *(part for spec in SCHEMES for part in ("-s", spec)), "-b", f"1-{batches}+1"]
    with local_cluster() as (address, kill), tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), []
        for file, more in (("cluster.jsonl", ["--cluster", address]), ("alone.jsonl", ["--jobs", str(NODES)])):
            began = time.monotonic()
            sweep = started(grid, folder, file, more)
            while "--cluster" in more and lines(folder / file) < batches * (len(SCHEMES) + 1) // 2:
                assert sweep.poll() is None, sweep.communicate()
                time.sleep(0.05)
            if "--cluster" in more:
                kill()
            out, err = sweep.communicate()
            assert sweep.returncode == 0, out + err
            seconds.append(time.monotonic() - began)
        there, here = (
            {record.case: record.outcome for record in store.read_results(folder / file).records}
            for file in ("cluster.jsonl", "alone.jsonl")
        )
        print(
            f"{lines(folder / 'cluster.jsonl')} rows on {NODES} nodes of which one was killed, in {seconds[0]:.0f} s; "
            f"{lines(folder / 'alone.jsonl')} rows without a cluster, in {seconds[1]:.0f} s; "
            f"cases and outcomes are {'equal' if there == here else 'NOT equal'}"
        )


def started(grid: Sequence[str], folder: Path, file: str, more: Sequence[str]) -> subprocess.Popen[str]:
    """Start a sweep."""
    command = [sys.executable, "-m", "actbench", "sweep", *grid, "-o", file, *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(file: Path) -> int:
    """Return how many rows a file has."""
    return len(file.read_text().splitlines()) if file.exists() else 0


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("same", "overhead", "schedule"))
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a case of overhead sleeps")
    given = parser.parse_args()
    if given.what == "overhead":
        overhead(given.cases, given.seconds)
    else:
        {"same": same, "schedule": schedule}[given.what](given.cases)


if __name__ == "__main__":
    main()
