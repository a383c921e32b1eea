"""Results files: one record per line, appended as each case ends, so that a killed experiment loses nothing.

A file only grows, with one exception: a killed process may leave a half-written line at its end, which is moved to
another file before the next line is written. The last of several records of one case counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, overload

from actbench.errors import StoreError
from actbench.model.contents import Contents
from actbench.model.data import Data
from actbench.model.measured import MeasuredRecord
from actbench.model.provenance import Machine
from actbench.model.records import Failure, Record
from actbench.paths import file_name
from actbench.report import lines
from actbench.report.linefile import LineFile, locked
from actbench.report.lines import RecordT
from actbench.units import format_bytes

Identity = tuple[Data, str, str | None]
"""The case, and the identity of the machine."""


@dataclass(frozen=True)
class Results(Generic[RecordT]):
    """The content of a results file: the last record of each case, machine and GPU, in the order of the file.

    ``notice`` tells the user of a half-written line. ``whole_bytes`` is the length of the whole lines.
    """

    records: tuple[RecordT, ...]
    notice: str | None
    whole_bytes: int
    file_bytes: int


class Store(Generic[RecordT]):
    """A results file that only this process writes to; made by :meth:`opened`."""

    def __init__(self, path: Path, results: Results[RecordT], machine: Machine | None = None) -> None:
        self.path = path
        self.notice = results.notice
        self._file = LineFile(path, results.whole_bytes, results.file_bytes)
        self._machine = machine
        self._records: dict[Identity, RecordT] = {}
        self._here: dict[Data, RecordT] = {}
        self._contents = Contents()
        for record in results.records:
            self._note(record)

    @classmethod
    @contextmanager
    def opened(cls, path: Path, kind: type[RecordT], machine: Machine | None = None) -> Iterator[Store[RecordT]]:
        """Lock the file for the length of an experiment, and make missing folders.

        Given a machine, records of other machines or GPUs in a shared file do not count: their cases run here again.

        Raises:
            StoreError: Another process writes to the file, it is not a results file, or it cannot be written.
        """
        with locked(path):
            yield cls(path, read_results(path, kind) if path.exists() else Results((), None, 0, 0), machine)

    @property
    def records(self) -> tuple[RecordT, ...]:
        """The last record of each case, machine and GPU."""
        return tuple(self._records.values())

    def find(self, case: Data) -> RecordT | None:
        """Return the record that counts for a case on this machine, if the files that it names hold the same now."""
        record = self._here.get(case)
        return record if record is not None and record.files == self._contents.of(case) else None

    def done(self, case: Data) -> bool:
        """Whether the file holds a record, measured or failed, of a case.

        An ``unavailable`` case is not done: the missing device or library may be there now. Nor is one whose largest
        batch is yet to be searched.
        """
        record = self.find(case)
        if record is None or record.awaits_search:
            return False
        return not (_failed(record) and record.outcome.reason == "unavailable")

    def failed(self, case: Data) -> bool:
        """Whether the record that counts for a case is a failure."""
        record = self.find(case)
        return record is not None and _failed(record)

    def _note(self, record: RecordT) -> None:
        self._records[_identity(record)] = record
        if self._machine is None or record.machine.identity == self._machine.identity:
            self._here[record.case] = record

    def append(self, record: RecordT) -> None:
        """Write a record and sync it; a StoreError, with the file unchanged, if it cannot be written.

        The record has the content of the files that its case names as it was when the case was first looked for here.
        """
        if files := self._contents.of(record.case):
            record = record.model_copy(update={"files": files})
        line = record.model_dump_json().encode()
        if len(line) > lines.LONGEST:
            raise StoreError(f"{self.path}: the record has {format_bytes(len(line))}, more than a line may have")
        self._file.append(line)
        self._note(record)


@overload
def read_results(path: Path) -> Results[MeasuredRecord]: ...
@overload
def read_results(path: Path, kind: type[RecordT]) -> Results[RecordT]: ...
def read_results(path: Path, kind: type[Any] = MeasuredRecord) -> Results[Any]:
    """Read a results file of one kind; it needs no lock, even while an experiment writes to the file.

    Raises:
        StoreError: The file cannot be read, is not a results file, or has a line that is broken or of a newer actbench;
            the message names the file and the line.
    """
    found = lines.split(path)
    return Results(tuple(_latest([found], kind).values()), found.notice, found.whole_bytes, found.file_bytes)


def read_all(paths: Sequence[Path], kind: type[RecordT]) -> tuple[list[RecordT], list[str]]:
    """Read several results files of one kind as one, and return their records and notices; later records win.

    Raises:
        StoreError: As of :func:`read_results`; or no file holds a record.
    """
    found = [lines.split(path) for path in paths]
    records = _latest(found, kind)
    if found and not records:
        raise StoreError(_no_row(found))
    return list(records.values()), [file.notice for file in found if file.notice]


def _latest(files: Sequence[lines.Lines], kind: type[RecordT]) -> dict[Identity, RecordT]:
    found: dict[Identity, RecordT] = {}
    shared: dict[Any, Any] = {}
    for file in files:
        for number, line in file.numbered():
            record = lines.parse_record(kind, line, f"{file.path}:{number}", shared)
            found[_identity(record)] = record
    return found


def _no_row(files: Sequence[lines.Lines]) -> str:
    held = (
        f"{file.path} {'holds only a half-written line, as a killed process leaves it' if file.notice else 'is empty'}"
        for file in files
    )
    return f"no row can be read: {'; '.join(held)}. Run the command that writes it, or name another results file"


def results_path(folder: Path, recipe: str, machine: str) -> Path:
    """Return the path of the results of a recipe on a machine: ``FOLDER/RECIPE/MACHINE.jsonl``."""
    return folder / file_name(recipe) / f"{file_name(machine)}.jsonl"


def _identity(record: Record[Any, Any]) -> Identity:
    return record.case, *record.machine.identity


def _failed(record: Record[Any, Any]) -> bool:
    return isinstance(record.outcome, Failure)
