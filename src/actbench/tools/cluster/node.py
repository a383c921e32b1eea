"""The requests that nodes receive: they measure cases as a sweep there would, each case in its own process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import actbench
from actbench.caches import user_cache
from actbench.errors import MeasurementError, UsageError
from actbench.machine import machine, versions
from actbench.model.data import Data
from actbench.model.measured import Outcome
from actbench.model.provenance import Machine, Versions
from actbench.model.records import Case, Failure
from actbench.model.sources import sources
from actbench.paths import MOST_BYTES, read_bytes, write_whole
from actbench.run.executor import BENCH, PRELOAD, Work
from actbench.run.local import LocalExecutor
from actbench.run.processes import ForkServer
from actbench.run.progress import Progress
from actbench.run.runner import outcomes


class Shared(Data):
    """What requests have in common.

    Attributes:
        files: The text of each file that cases name, by its path from the current folder of the command.
        sources: What :func:`~actbench.model.sources.sources` returns on the machine of the command.
    """

    files: dict[str, str]
    sources: str


class Request(Data):
    """Cases that are measured together.

    Attributes:
        known_exact: Whether the exact model has a record already and is not among the cases: it is timed again with
            them.
        timeout_seconds: As of :func:`actbench.run.runner.run_plan`; likewise ``bench`` and ``preload``.
    """

    cases: tuple[Case, ...]
    known_exact: bool = False
    timeout_seconds: float | None
    bench: str = BENCH
    preload: tuple[str, ...] = PRELOAD


class Here(Data):
    """Where a task runs."""

    machine: Machine
    versions: Versions


class CasesReply(Here):
    """The outcome of each case, in any order, and the node that measured it."""

    outcomes: tuple[tuple[Case, Outcome], ...]


class CrashedError(Exception):
    """A case ended its process, so that another try may do better; the argument is the reply, in JSON."""


def measure(text: str, shared: str) -> str:
    """Measure the cases of a :class:`Request` and return a :class:`CasesReply`; ``shared`` is a :class:`Shared`.

    All are JSON.

    Raises:
        CrashedError: A case ended its process.
        MeasurementError: This node has another actbench, or the processes of cases cannot be started.
    """
    prepare(shared)
    request = Request.model_validate_json(text)
    where = dict(here())
    work = Work(
        Progress(),
        command="",
        timeout_seconds=request.timeout_seconds,
        bench=request.bench,
        preload=request.preload,
        done=lambda case: request.known_exact,
    )
    with (
        serving(request.bench, request.preload) as server,
        LocalExecutor(work, origin=where, server=server) as local,
        closing(outcomes(local, work, request.cases)) as told,  # stops what is at work, for which the executor waits
    ):
        found = {case: outcome for case, outcome, _ in told}  # of each case the last
    reply = CasesReply(outcomes=tuple(found.items()), **where).model_dump_json()
    if any(isinstance(outcome, Failure) and outcome.reason == "crash" for outcome in found.values()):
        raise CrashedError(reply)
    return reply


@functools.lru_cache(maxsize=1)  # the same for all tasks of an experiment
def prepare(text: str) -> None:
    """Compare the sources of a :class:`Shared`, in JSON, and make a folder with its files the current one.

    Raises:
        MeasurementError: This node has another actbench, or the folder cannot be made.
    """
    shared = Shared.model_validate_json(text)
    if shared.sources != sources():
        raise MeasurementError(
            f"the node {socket.gethostname()} has another actbench ({actbench.__version__} in "
            f"{Path(actbench.__file__).parent}) than the machine of the command: install the same on all nodes"
        )
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what cases start imports nothing from that folder
    _place(shared.files)


def here() -> Here:
    """Return where this task runs; a worker of Ray's sees other GPUs in each task."""
    return _here(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _here(visible: str | None) -> Here:
    return Here(machine=machine(), versions=versions())


class _Serving:
    """The fork server of a worker of Ray's, which does several tasks in turn and ends it with itself.

    What Ray lets a task see and use stands in the environment, and another environment needs another server.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._server: ForkServer | None = None

    def server(self, bench: str, preload: tuple[str, ...]) -> ForkServer:
        """Return a server, the last one where that will do."""
        seen = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
        key = (bench, preload, os.getcwd(), *seen)
        if self._server is None or key != self._key:
            self.close()
            self._key, self._server = key, ForkServer(bench, preload)
        return self._server

    def close(self) -> None:
        """End the server; the next is another."""
        if self._server is not None:
            self._server.close()
            self._server = None


@contextmanager
def serving(bench: str, preload: tuple[str, ...] = PRELOAD) -> Iterator[ForkServer]:
    """Give this worker's server; after a MeasurementError, such as a server that is gone, the next call starts one."""
    held = _held()
    try:
        yield held.server(bench, preload)
    except MeasurementError:
        held.close()
        raise


@functools.cache
def _held() -> _Serving:
    return _Serving()


def _place(files: dict[str, str]) -> None:
    """Make a folder with these files the current one, before the server starts in it.

    Its name is a digest of them, so that all workers of a node, and those that come after them, share one folder. A
    worker may be killed at any time: what it leaves is there to be used again.

    Raises:
        MeasurementError: The folder cannot be made.
    """
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    root = user_cache() / "cluster" / digest
    try:
        root.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _put(root / name, text.encode())
        os.chdir(root)
    except OSError as error:
        raise MeasurementError(
            f"the node {socket.gethostname()} cannot make the folder {root}: {error.strerror}; let XDG_CACHE_HOME name "
            "one there that can be written"
        ) from None


def _put(file: Path, content: bytes) -> None:
    """Write a file whole or not at all, unless it is there: other workers write and read it too."""
    if file.is_file() and file.read_bytes() == content:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)


def shared_of(files: Mapping[str, str]) -> str:
    """Return what all requests share, as a :class:`Shared` in JSON; ``files`` are as of :func:`files_of`."""
    return Shared(files=dict(files), sources=sources()).model_dump_json()


def files_of(cases: Iterable[Case]) -> dict[str, str]:
    """Return the text of each ``.py`` and ``.toml`` file that models, schemes or device profiles name, by its path.

    A path that begins at the root, or with ``~``, is left to the nodes, which may share a file system.

    Raises:
        UsageError: A file is above the current folder, is not text, or has more than 1 MiB.
    """
    told = dict.fromkeys((case.model, case.scheme, case.device_profile) for case in cases)
    names = dict.fromkeys(name for each in told for name in _named(*each))
    ours = (name for name in names if not os.path.isabs(name) and not name.startswith("~"))
    return {name: _text(name) for name in ours if Path(name).is_file()}  # the node reports other modules as missing


def _named(model: str, scheme: str, device_profile: str | None) -> Iterator[str]:
    from actbench import scheme as schemes  # and with them torch, which reading results does without
    from actbench.scheme.facets import RunsFiles

    files = schemes.build(scheme).facet(RunsFiles)
    for spec in (model, *(files.paths if files else ())):
        file, _, name = spec.rpartition(":")
        if name and file.endswith(".py"):
            yield file
    if device_profile is not None and device_profile.endswith(".toml"):
        yield device_profile


def _text(name: str) -> str:
    if not Path(name).resolve().is_relative_to(Path.cwd().resolve()):
        raise UsageError(f"--cluster: {name} is outside of the current folder, and is not sent to the nodes")
    try:
        return read_bytes(Path(name), MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"--cluster: {name} cannot be sent to the nodes: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--cluster: {name} is not text ({error.reason}), and is not sent to the nodes") from None
