"""What a node does: it measures a few cases as a sweep on that machine would, each in a process of its own."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import tempfile
from pathlib import Path

import actbench
from actbench.errors import MeasurementError
from actbench.experiments.runner.processes import ForkServer
from actbench.experiments.runner.progress import Progress
from actbench.experiments.runner.runner import BENCH, PRELOAD, Sweep
from actbench.results.machine import machine, provenance
from actbench.results.measured import Outcome
from actbench.results.records import Case, Data, Machine, Versions


class Request(Data):
    """Cases that are measured together.

    Attributes:
        known_exact: Whether their exact model, which is not among them, has a record: it is timed again beside them.
        timeout_seconds: As of :func:`actbench.experiments.runner.runner.run`.
        files: The text of each file that the cases name, by its path from the current folder of who asks.
        sources: What :func:`sources` returns where it is asked.
        command: For the records.
    """

    cases: tuple[Case, ...]
    known_exact: bool = False
    timeout_seconds: float | None
    files: dict[str, str]
    sources: str
    command: str


class Reply(Data):
    """What came of each case, in any order, and where.

    Attributes:
        host: Of the node, for messages.
    """

    outcomes: tuple[tuple[Case, Outcome], ...]
    machine: Machine
    versions: Versions
    host: str


def measure(text: str) -> str:
    """Measure the cases of a :class:`Request` in JSON and return a :class:`Reply` in JSON.

    Raises:
        MeasurementError: This node has another actbench, or the processes of cases cannot be started.
    """
    request = Request.model_validate_json(text)
    if request.sources != sources():
        raise MeasurementError(
            f"the node {socket.gethostname()} has another actbench ({actbench.__version__} in "
            f"{Path(actbench.__file__).parent}) than the machine that runs the sweep: install the same on all nodes"
        )
    _place(request.files)
    try:
        sweep = Sweep(_server(), machine(), lambda case: request.known_exact, 1, request.timeout_seconds, Progress())
        outcomes = tuple(sweep.outcomes(request.cases))
    except MeasurementError:
        _server.cache_clear()  # the next cases get another
        raise
    origin = provenance(request.command)
    reply = Reply(outcomes=outcomes, machine=origin["machine"], versions=origin["versions"], host=socket.gethostname())
    return reply.model_dump_json()


@functools.cache
def sources() -> str:
    """Return a digest of actbench's own files: equal ones measure alike."""
    root = Path(actbench.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".cu")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _server() -> ForkServer:
    """Return the server of this worker of Ray's, which does several tasks in turn and ends it with itself."""
    return ForkServer(BENCH, PRELOAD)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="actbench-cluster-")


def _place(files: dict[str, str]) -> None:
    """Make a folder with these files the current one, before the server starts in it."""
    root = Path(_folder().name)
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    os.chdir(root)
