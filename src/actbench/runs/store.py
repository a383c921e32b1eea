"""Files of training runs: one run a line, appended as each ends. Of several runs of one case the last counts.

Their names end with ``.runs.jsonl``, so that what reads the files of a sweep leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from actbench.records import Failure, Machine
from actbench.runs.records import SCHEMA_VERSION, TrainingRun
from actbench.store import lines, results_path
from actbench.store.linefile import LineFile
from actbench.store.store import RUNS_SUFFIX, alone

Identity = tuple[str, str, str | None]


class RunStore:
    """A file of training runs that this process alone writes to; made by :meth:`opened`."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self._machine = machine.identity
        self.notice: str | None = None
        self._file = LineFile(path)
        self._runs: dict[Identity, TrainingRun] = {}
        if path.exists():
            found = lines.split(path)
            self._file = LineFile(path, found.whole_bytes, found.file_bytes)
            self._runs = {_identity(run): run for run in _parsed(path, found)}
            self.notice = found.notice

    @classmethod
    @contextmanager
    def opened(cls, path: Path, machine: Machine) -> Iterator[RunStore]:
        """Hold the file for as long as the block runs; folders on the way to it are made.

        Args:
            path: The file.
            machine: This one; the runs of others, and with another GPU, leave a case to be trained here.

        Raises:
            StoreError: Another process writes to the file, it is no file of runs, or it cannot be written.
        """
        with alone(path):
            yield cls(path, machine)

    def done(self, case_key: str) -> TrainingRun | None:
        """Return the run of a case on this machine; one that was ``unavailable`` is to be tried again."""
        run = self._runs.get((case_key, *self._machine))
        if run is None or (isinstance(run.outcome, Failure) and run.outcome.reason == "unavailable"):
            return None
        return run

    def append(self, run: TrainingRun) -> None:
        """Write a run behind the others and wait until the disk has it.

        Raises:
            StoreError: The line cannot be written; the file is then as it was before.
        """
        self._file.append(run.model_dump_json().encode())
        self._runs[_identity(run)] = run


def read(path: Path) -> tuple[TrainingRun, ...]:
    """Read a file of runs without a lock, one run for each case, machine and GPU.

    Raises:
        StoreError: The file cannot be read or is no file of runs.
    """
    return tuple({_identity(run): run for run in _parsed(path, lines.split(path))}.values())


def json_text(runs: Sequence[TrainingRun]) -> str:
    """Return runs as a JSON list, each as it stands in a file of runs."""
    return TypeAdapter(list[TrainingRun]).dump_json(list(runs), indent=2).decode() + "\n"


def runs_path(output: Path, recipe: str, machine: str) -> Path:
    """Return where runs are kept: ``OUTPUT/RECIPE/MACHINE.runs.jsonl``, or ``output`` where it names a file."""
    if output.suffix == ".jsonl":
        return output
    return results_path(output, recipe, machine).with_suffix(RUNS_SUFFIX)


def _parsed(path: Path, found: lines.Lines) -> Iterator[TrainingRun]:
    for number, line in found.numbered():
        yield lines.parse_as(TrainingRun, line, f"{path}:{number}", SCHEMA_VERSION, {})


def _identity(run: TrainingRun) -> Identity:
    return run.case.key(), *run.machine.identity
