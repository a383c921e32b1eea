"""Results files: one record a line, appended as each case ends, so that a killed sweep loses nothing.

A file is only ever lengthened. The exception is the half-written line, without its newline, that a killed process may
leave at its end: it is left out when reading, and moved to a file beside before the next line is written. Of several
records of one case the last counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from actbench.errors import StoreError
from actbench.paths import LONGEST_NAME, check_makeable
from actbench.records import Failure, Machine, Record
from actbench.store import lines
from actbench.store.linefile import LineFile
from actbench.store.sharing import Shared

Identity = tuple[str, str, str | None]
"""Key of the case, and what tells the machine from others."""

RUNS_SUFFIX = ".runs.jsonl"  # files of training runs, which may stand beside those of a sweep


@dataclass(frozen=True)
class Results:
    """What a results file holds.

    Attributes:
        records: In the order of the file, one for each case, machine and GPU.
        notice: What a user must know of how the file was read, or None.
        whole_bytes: Length of the part that holds whole lines.
        file_bytes: Length of the file.
    """

    records: tuple[Record, ...]
    notice: str | None
    whole_bytes: int
    file_bytes: int


class Store:
    """A results file that this process alone writes to; made by :meth:`open_for_sweep`."""

    def __init__(self, path: Path, results: Results, machine: Machine | None = None) -> None:
        self.path = path
        self.notice = results.notice
        self._file = LineFile(path, results.whole_bytes, results.file_bytes)
        self._records = {_identity(record): record for record in results.records}
        self._machine = machine
        self._done: dict[str, Record] = {}
        for record in results.records:
            self._note(record)

    @classmethod
    @contextmanager
    def open_for_sweep(cls, path: Path, machine: Machine | None = None) -> Iterator[Store]:
        """Hold the file for as long as a sweep runs; folders on the way to it are made.

        Args:
            path: The file.
            machine: This one: the records of others, or with another GPU, in a file that several share, leave a case to
                be measured here. None counts the records of all.

        Raises:
            StoreError: Another process writes to the file, it is no results file, or it cannot be written.
        """
        with alone(path):
            results = Results((), None, 0, 0) if not path.exists() else read(path)
            yield cls(path, results, machine)

    @property
    def records(self) -> tuple[Record, ...]:
        """What the file holds now, one record for each case, machine and GPU."""
        return tuple(self._records.values())

    def done(self, case_key: str) -> bool:
        """Whether the file holds a record, measured or failed, of the case with this key.

        A case that was ``unavailable`` is not done: what the machine lacked may have been installed since.
        """
        return case_key in self._done

    def failed(self, case_key: str) -> bool:
        """Whether the record that counts for the case with this key is of a failure."""
        return case_key in self._done and isinstance(self._done[case_key].outcome, Failure)

    def _note(self, record: Record) -> None:
        here = self._machine is None or record.machine.identity == self._machine.identity
        if here and not (isinstance(record.outcome, Failure) and record.outcome.reason == "unavailable"):
            self._done[record.case.key()] = record

    def append(self, record: Record) -> None:
        """Write a record behind the others and wait until the disk has it.

        Raises:
            StoreError: The line cannot be written; the file is then as it was before.
        """
        self._file.append(record.model_dump_json().encode())
        self._records[_identity(record)] = record
        self._note(record)


def read(path: Path) -> Results:
    """Read a results file; no lock is needed, a sweep may be writing to it.

    Raises:
        StoreError: The file cannot be read, is no results file, or holds a broken line or one of a newer actbench; the
            message names the file and the line.
    """
    found = lines.split(path)
    return Results(tuple(_latest([found]).values()), found.notice, found.whole_bytes, found.file_bytes)


def read_all(paths: Sequence[Path], sites: bool = True) -> tuple[list[Record], list[str]]:
    """Read several results files as one, the later ones counting.

    Args:
        paths: The files.
        sites: Whether the records keep what was converted and what was not reached, which tables do not show.

    Returns:
        The records and the notices.
    """
    found = [lines.split(path) for path in paths]
    return list(_latest(found, sites).values()), [file.notice for file in found if file.notice]


def _latest(files: Sequence[lines.Lines], sites: bool = True) -> dict[Identity, Record]:
    """Return the last record of each case, machine and GPU."""
    shared = Shared(sites)
    records = (
        shared.record(lines.parse(line, f"{file.path}:{number}")) for file in files for number, line in file.numbered()
    )
    return {_identity(record): record for record in records}


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Return the results files among paths and in the folders among them, at any depth, each once.

    Raises:
        StoreError: A folder holds none.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(_below(path)) if os.path.isdir(path) else [path]
        if not found:
            raise StoreError(f"{path} holds no results file (.jsonl)")
        files += found
    return list(dict.fromkeys(files))


def _below(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*.jsonl") if not file.name.endswith(RUNS_SUFFIX))


def results_path(folder: Path, recipe: str, machine: str) -> Path:
    """Return where the results of a recipe on a machine stand: ``FOLDER/RECIPE/MACHINE.jsonl``."""
    return folder / _file_name(recipe) / f"{_file_name(machine)}.jsonl"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_NAME].strip("-.") or "unnamed"


def _identity(record: Record) -> Identity:
    return record.case.key(), *record.machine.identity


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock beside the file, which is gone afterwards; folders on the way to it are made.

    Raises:
        StoreError: Another process holds it, or it cannot be written there.
    """
    if os.path.isdir(path):
        raise StoreError(f"{path} is a folder: name a results file in it, such as {path / 'results.jsonl'}")
    check_makeable(path)
    lock_path = path.with_name(f"{path.name}.lock")
    lock = FileLock(lock_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            os.close(os.open(path, os.O_RDWR))
        holder = _holder(lock_path)  # before asking for the lock: some versions of filelock empty the file in asking
        lock.acquire(timeout=0)
        lock_path.write_text(f"{os.getpid()}\n")
    except Timeout:
        raise StoreError(
            f"{path}: another actbench process{holder} is writing there; wait until it ends, or name another file "
            f"with --output"
        ) from None
    except OSError as error:
        lock.release()
        raise StoreError(f"{path}: results cannot be written there: {error.strerror}: {error.filename}") from None
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is gone, or can no longer be written: the lock ends all the same
            lock_path.unlink()
        lock.release()


def _holder(lock_path: Path) -> str:
    """Return which process wrote the lock file, as far as it says."""
    try:
        text = lock_path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return f" (process {text})" if text.isdigit() else ""
