"""The kinds of experiments: the names of their results files, their records and their tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic

from actbench.errors import StoreError, UsageError
from actbench.leftovers import temporary_folder
from actbench.results import lines, render
from actbench.results.fits import FitRecord
from actbench.results.lines import RecordT
from actbench.results.machine import machine
from actbench.results.measured import MeasuredRecord
from actbench.results.render import exports
from actbench.results.render.page import memory, training
from actbench.results.render.page.pictures import Beside
from actbench.results.runs import TrainingRun
from actbench.results.store import (
    FITS_SUFFIX,
    RUNS_SUFFIX,
    SWEEP_SUFFIX,
    Store,
    files_below,
    read_kind,
    results_path,
)
from actbench.results.tables import Table, report_tables
from actbench.results.tables.fits import FIT_TITLE, fit_tables
from actbench.results.tables.training import accuracy_table

BESIDE = (".md", ".csv")
"""Suffixes of the tables beside a results file."""


@dataclass(frozen=True, eq=False)
class Kind(Generic[RecordT]):
    """A kind of experiment.

    Attributes:
        record: Class of its records.
        suffix: Suffix of its files.
        tables: From records and a title to tables: beside a results file, the first is written as CSV, all as Markdown.
        title: Title of the tables of all its files; None if each recipe has its own.
        beside: From records to what an HTML page shows beside their tables.
        older: Readers of older files that are no results files, by suffix.
    """

    record: type[RecordT]
    suffix: str
    tables: Callable[[Sequence[RecordT], str], Sequence[Table]]
    title: str | None = None
    beside: Callable[[Sequence[RecordT]], Beside] | None = None
    older: Mapping[str, Callable[[Path], list[RecordT]]] = field(default_factory=dict)

    def texts(self, records: Sequence[RecordT], title: str) -> dict[str, str]:
        """Return the texts of the files beside a results file, by suffix."""
        tables = self.tables(records, title)
        rendered = "\n".join(map(render.markdown, tables)), render.csv_text(tables[0])
        return dict(zip(BESIDE, rendered, strict=True))

    def write_beside(self, file: Path, records: Sequence[RecordT], title: str) -> None:
        """Write the tables beside a results file."""
        exports.export({file.with_suffix(suffix): text for suffix, text in self.texts(records, title).items()})

    @contextmanager
    def opened(self, recipe: str, output: Path | None, *, of_any_machine: bool = False) -> Iterator[Store[RecordT]]:
        """Open and lock the results file of a recipe on this machine.

        ``output`` is a folder for ``RECIPE/MACHINE`` with this kind's suffix; a ``.jsonl`` file; or None for a
        temporary one. With ``of_any_machine``, records of other machines count too.

        Raises:
            UsageError: ``output`` has the name of another kind of file.
            StoreError: The file is in use or broken, or it or a table beside it cannot be written.
        """
        if output is not None and output.suffix in (".md", ".csv", ".json", ".html") and not output.is_dir():
            raise UsageError(f"--output {output}: name a folder or a .jsonl file")
        here = machine()
        with temporary_folder() as folder:
            file = folder / "kept.jsonl" if output is None else output
            if file.suffix != ".jsonl":
                file = results_path(file, recipe, here.name).with_suffix(self.suffix)
            for suffix in BESIDE:
                exports.check(file.with_suffix(suffix))
            with Store.opened(file, self.record, None if of_any_machine else here) as store:
                yield store


MEASURED: Final = Kind(MeasuredRecord, SWEEP_SUFFIX, report_tables, beside=memory.beside_measured)
TRAINED: Final = Kind(
    TrainingRun, RUNS_SUFFIX, lambda runs, title: (accuracy_table(runs, title),), beside=training.beside_trained
)
FITTED: Final = Kind(FitRecord, FITS_SUFFIX, fit_tables, FIT_TITLE)
OTHERS: Final[tuple[Kind[Any], ...]] = (TRAINED, FITTED)
"""Kinds whose files may be in one folder with those of sweeps."""


def kind_in(paths: Sequence[Path]) -> tuple[Kind[Any], list[Path]]:
    """Return the results files among paths and in folders among them, after their kind.

    If a folder holds files of sweeps, only these count.

    Raises:
        StoreError: A folder holds no results file, or there are files of several kinds.
    """
    found = {path: _kinds_at(path) for path in paths}
    for path, files in found.items():
        if not files:
            raise StoreError(f"{path} holds no results file (.jsonl)")
    kinds = dict.fromkeys(kind for files in found.values() for kind in files)
    if len(kinds) > 1:
        text = ", ".join(f"{path}: {' and '.join(kind.suffix for kind in files)}" for path, files in found.items())
        raise StoreError(f"results of several kinds have no columns in common, report one kind alone: {text}")
    (kind,) = kinds
    return kind, list(dict.fromkeys(file for files in found.values() for file in files[kind]))


def _kinds_at(path: Path) -> dict[Kind[Any], list[Path]]:
    if not os.path.isdir(path):
        return {_kind_of(path): [path]}
    if measured := files_below(path):
        return {MEASURED: measured}
    found = {kind: sorted(path.rglob(f"*{kind.suffix}")) for kind in OTHERS}
    return {kind: files for kind, files in found.items() if files}


def _kind_of(path: Path) -> Kind[Any]:
    """Return the kind of a file by its name, or else by its first record, or else that of sweeps."""
    for kind in OTHERS:
        if path.name.endswith((kind.suffix, *kind.older)):
            return kind
    with suppress(StoreError):
        _, first = next(lines.split(path).numbered(), (0, b""))
        for kind in (MEASURED, *OTHERS):
            with suppress(StoreError):
                lines.parse(kind.record, first, path.name)
                return kind
    return MEASURED


def read(kind: Kind[RecordT], files: Sequence[Path]) -> tuple[list[RecordT], list[str]]:
    """Return the records of files of one kind (later ones replace earlier ones), and notices for the user."""
    older = [file for file in files if file.suffix in kind.older]
    others = [file for file in files if file not in older]
    records, notices = read_kind(others, kind.record, may_be_empty=bool(older))
    return [record for file in older for record in kind.older[file.suffix](file)] + records, notices
