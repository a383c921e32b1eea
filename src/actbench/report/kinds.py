"""The kinds of experiments: the names of their results files, their records and their tables.

The measured cases of sweeps are one. Plug-ins bring the others; a kind is imported when one of its files is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, cast

from actbench import plugins
from actbench.errors import StoreError, UsageError
from actbench.machine import machine
from actbench.model.measured import MeasuredRecord
from actbench.report import lines, render
from actbench.report.lines import RecordT
from actbench.report.render import exports
from actbench.report.store import Store, results_path
from actbench.report.tables import Table, report_tables
from actbench.tempfiles import temporary_folder

BESIDE = (".md", ".csv")
"""Suffixes of the tables beside a results file."""


@dataclass(frozen=True, eq=False)
class Kind(Generic[RecordT]):
    """A kind of experiment: what an entry point of ``actbench.kinds`` names.

    Attributes:
        name: That of the entry point. Files of the kind ``runs`` end in ``.runs.jsonl``; those of ``measured``, which
            is the kind of sweeps, in ``.jsonl`` alone.
        record: Class of its records, whose cases are :class:`~actbench.model.data.CaseData`.
        tables: From records and a title to tables: beside a results file, the first is written as CSV, all as Markdown.
        title: Title of the tables of all its files; None if each recipe has its own.
    """

    name: str
    record: type[RecordT]
    tables: Callable[[Sequence[RecordT], str], Sequence[Table]]
    title: str | None = None

    @property
    def suffix(self) -> str:
        """What the names of its files end in."""
        return _suffix(self.name)

    def texts(self, records: Sequence[RecordT], title: str) -> dict[str, str]:
        """Return the texts of the files beside a results file, by suffix."""
        tables = self.tables(records, title)
        rendered = "\n".join(map(render.markdown, tables)), render.csv_text(tables[0])
        return dict(zip(BESIDE, rendered, strict=True))

    def write_beside(self, file: Path, records: Sequence[RecordT], title: str) -> None:
        """Write the tables beside a results file."""
        exports.export({file.with_suffix(suffix): text for suffix, text in self.texts(records, title).items()})

    def file(self, recipe: str, output: Path) -> Path:
        """Return the results file of a recipe on this machine, for an ``output`` as of :meth:`opened`.

        Raises:
            UsageError: ``output`` has the name of another kind of file.
        """
        if output.suffix in (".md", ".csv", ".json", ".html") and not output.is_dir():
            raise UsageError(f"--output {output}: name a folder or a .jsonl file")
        if output.suffix == ".jsonl":
            return output
        return results_path(output, recipe, machine().name).with_suffix(self.suffix)

    @contextmanager
    def opened(self, recipe: str, output: Path | None, *, of_any_machine: bool = False) -> Iterator[Store[RecordT]]:
        """Open and lock the results file of a recipe on this machine.

        ``output`` is a folder for ``RECIPE/MACHINE`` with this kind's suffix; a ``.jsonl`` file; or None for a
        temporary one. With ``of_any_machine``, records of other machines count too.

        Raises:
            UsageError: ``output`` has the name of another kind of file.
            StoreError: The file is in use or broken, or it or a table beside it cannot be written.
        """
        here = machine()
        with temporary_folder() as folder:
            file = folder / "kept.jsonl" if output is None else self.file(recipe, output)
            for suffix in BESIDE:
                exports.check_writable(file.with_suffix(suffix))
            with Store.opened(file, self.record, None if of_any_machine else here) as store:
                yield store


MEASURED: Final = Kind("measured", MeasuredRecord, report_tables)
"""The kind of sweeps. Files of other kinds may be in one folder with its own."""


def _suffix(name: str) -> str:
    return ".jsonl" if name == "measured" else f".{name}.jsonl"


def _others() -> list[str]:
    return [name for name in plugins.installed("kinds") if name != MEASURED.name]


def _kind(name: str, file: Path) -> Kind[Any]:
    """Return a kind by its name; a StoreError, about a file of it, if its plug-in is missing or cannot be used."""
    if name == MEASURED.name:
        return MEASURED
    plugin = plugins.installed("kinds").get(name)
    if plugin is None:
        why = "no installed package brings it: install the one whose entry point in actbench.kinds has that name"
    else:
        what = fault(plugin)
        if what is None:
            return cast("Kind[Any]", plugin.load())
        why = f"the plug-in of {plugin.package} that reads it cannot be used: {what}"
    raise StoreError(f"{file}: a file that ends in {_suffix(name)} holds records of the kind {name!r}, and {why}")


def usable() -> list[Kind[Any]]:
    """Return all kinds, the measured first; plug-ins that cannot be used are warned of."""
    found: list[Kind[Any]] = list(plugins.loaded("kinds", fault).values())
    return [MEASURED, *(kind for kind in found if kind.name != MEASURED.name)]


def fault(plugin: plugins.Plugin) -> str | None:
    """Return why a plug-in is no kind of its name; None if it is one."""
    if why := plugins.fault(plugin, Kind):
        return why
    name = plugin.load().name  # files are named by it, and found by the entry point's
    return None if name == plugin.name else f"its kind has another name: {name!r}"


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Return the results files of sweeps among paths and, at any depth, in the folders among them, each once.

    Raises:
        StoreError: A folder holds no results file, or a file is of a kind that no plug-in reads.
    """
    files: list[Path] = []
    for path in paths:
        is_folder = os.path.isdir(path)
        found = files_below(path) if is_folder else [path]
        if not found:
            raise StoreError(f"{path} holds no results file (.jsonl)")
        if not is_folder and (missing := _missing(path)):
            _kind(missing, path)
        files += found
    return list(dict.fromkeys(files))


def files_below(folder: Path, kind: str = MEASURED.name) -> list[Path]:
    """Return the results files of a kind in a folder at any depth."""
    found = sorted(folder.rglob(f"*{_suffix(kind)}"))
    if kind != MEASURED.name:
        return found
    others = tuple(map(_suffix, _others()))
    return [file for file in found if not file.name.endswith(others) and _missing(file) is None]


def kind_in(paths: Sequence[Path]) -> tuple[Kind[Any], list[Path]]:
    """Return the results files among paths and in folders among them, after their kind.

    If a folder holds files of sweeps, only these count.

    Raises:
        StoreError: A folder holds no results file, there are files of several kinds, or of an unknown kind.
    """
    found = {path: _names_at(path) for path in paths}
    for path, files in found.items():
        if not files:
            raise StoreError(f"{path} holds no results file (.jsonl)")
    names = dict.fromkeys(name for files in found.values() for name in files)
    if len(names) > 1:
        text = ", ".join(f"{path}: {' and '.join(map(_suffix, files))}" for path, files in found.items())
        raise StoreError(f"results of several kinds have no columns in common, report one kind alone: {text}")
    (name,) = names
    every = list(dict.fromkeys(file for files in found.values() for file in files[name]))
    return _kind(name, every[0]), every


def _names_at(path: Path) -> dict[str, list[Path]]:
    """Return the results files at a path by the names of their kinds."""
    if not os.path.isdir(path):
        return {_name_of(path): [path]}
    if measured := files_below(path):
        return {MEASURED.name: measured}
    found = {name: files_below(path, name) for name in _others()}
    for file in sorted(path.rglob("*.jsonl")):
        if name := _missing(file):
            found.setdefault(name, []).append(file)
    return {name: files for name, files in found.items() if files}


def _name_of(path: Path) -> str:
    """Return the kind of a file by its name, or else by its first record, or else that of sweeps."""
    for name in _others():
        if path.name.endswith(_suffix(name)):
            return name
    first = lines.first_data(path)
    if path.suffix == ".jsonl" and _is_of(MEASURED, first):
        return MEASURED.name
    by_record = (kind.name for kind in usable() if _is_of(kind, first))
    return next(by_record, None) or _missing(path) or MEASURED.name


def _is_of(kind: Kind[Any], data: Any) -> bool:
    """Return whether the JSON values of a record are one of a kind."""
    with suppress(StoreError):
        lines.record_of(kind.record, data, "")
        return True
    return False


_NAMED = re.compile(r".+\.([a-z][a-z0-9_-]*)\.jsonl")


def _missing(path: Path) -> str | None:
    """Return the kind that a file has by its name, if it holds records that no installed plug-in reads."""
    found = _NAMED.fullmatch(path.name)
    if found is None or found[1] in plugins.installed("kinds"):
        return None
    first = lines.first_data(path)
    is_record = isinstance(first, dict) and next(iter(first), None) == "schema_version"
    return found[1] if is_record and not _is_of(MEASURED, first) else None
