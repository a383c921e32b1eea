"""Caches the answer to a whole ``fit`` command: the same command shows it again without torch.

A search needs the outcomes of its cases to know which case comes next, and what makes plans imports torch. So the rows
of a results file alone cannot answer a command: what it showed is kept beside them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from actbench import plugins
from actbench.machine import machine, version_of
from actbench.model.contents import Contents
from actbench.model.records import Case
from actbench.report import lines
from actbench.report.render.exports import export
from actbench.report.tables.table import Table
from actbench.report.tables.values import Column, Curve
from actbench.tools.fit.records import FitRecord


@dataclass(frozen=True)
class Shown:
    """What a command shows.

    Attributes:
        code: Code to paste, each with a heading.
        counted: How many simulations there were.
        is_possible: Whether something fits.
        records: Returns the records of what was simulated of the model itself.
        is_whole: Whether all was tried, and nothing crashed.
        path: The results file, if one is kept.
    """

    tables: tuple[Table, ...]
    code: tuple[tuple[str, str], ...]
    counted: tuple[str, ...]
    remarks: tuple[str, ...]
    is_possible: bool
    records: Callable[[], Sequence[FitRecord]]
    is_whole: bool = True
    path: Path | None = None


class CachedAnswer:
    """The place of the answer to a command, by all that decides what it shows.

    Another code of actbench, another torch, another machine, and another content of a file that the command names make
    another place. ``flags`` are what else is asked, as JSON values; records are stored in ``output``, a folder or a
    ``.jsonl`` file.
    """

    def __init__(self, case: Case, schemes: Sequence[str], flags: Mapping[str, Any], output: Path) -> None:
        here, root = machine(), Path(__file__).parents[2]
        found = {
            "case": case.model_dump(mode="json"),
            "schemes": list(schemes),
            "flags": dict(flags),
            # a scheme may name a file with functions
            "files": Contents().of(case.model_copy(update={"scheme": "+".join(schemes)})),
            "versions": [platform.python_version(), *map(version_of, _LIBRARIES)],
            "packages": sorted({each.package for each in plugins.installed("schemes").values()}),
            # a checkout has many states of one version
            "code": [
                [str(file.relative_to(root)), (state := file.stat()).st_size, state.st_mtime_ns]
                for file in sorted(root.rglob("*.py"))
            ],
            "machine": [*here.identity, here.cores],
        }
        name = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
        folder = output.with_suffix(".answers") if output.suffix == ".jsonl" else output / "answers"
        self._file = folder / f"{name}.json"

    def read(self) -> Shown | None:
        """Return what the command showed when it had tried all; None if it has not, or its rows are gone."""
        try:
            data = json.loads(self._file.read_bytes())
            results, length = Path(data["results"]), data["bytes"]
            if _digest(results, length) != data["digest"]:
                return None
        except (OSError, ValueError, KeyError):
            return None
        return Shown(
            tuple(map(_table, data["tables"])),
            tuple((heading, text) for heading, text in data["code"]),
            (f"nothing was simulated: {self._file} has the answer to this command",),
            tuple(data["remarks"]),
            data["is_possible"],
            lambda: _records(results, length, data["records"]),
        )

    def write(self, shown: Shown) -> None:
        """Store an answer if it is one from all simulations, the rows of which are in its results file.

        Raises:
            StoreError: The file cannot be written.
        """
        if not shown.is_whole or shown.path is None:
            return
        length = lines.split(shown.path).whole_bytes
        data = {
            "results": str(shown.path.absolute()),
            "bytes": length,
            "digest": _digest(shown.path, length),
            "tables": [_data_of(table) for table in shown.tables],
            "code": shown.code,
            "remarks": shown.remarks,
            "is_possible": shown.is_possible,
            "records": [_identity(record) for record in shown.records()],
        }
        export({self._file: json.dumps(data)})


_LIBRARIES = ("torch", "torchvision", "transformers", "torchao")


def _digest(file: Path, length: int) -> str:
    """Return a digest of the beginning of a file: other commands add rows behind it."""
    found, left = hashlib.sha256(), length
    with file.open("rb") as opened:
        while left and (block := opened.read(min(left, 2**20))):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def _records(file: Path, length: int, wanted: Sequence[list[str]]) -> list[FitRecord]:
    """Return the records of an answer as they were when it was given."""
    found = {}
    for number, line in replace(lines.split(file), whole_bytes=length).numbered():
        record = lines.parse_record(FitRecord, line, f"{file}:{number}")
        found[tuple(_identity(record))] = record
    return [found[tuple(each)] for each in wanted]


def _identity(record: FitRecord) -> list[str]:
    return [record.case.model_dump_json(), *map(str, record.machine.identity)]


def _data_of(table: Table) -> dict[str, Any]:
    columns = [{key: value for key, value in vars(each).items() if key != "compute"} for each in table.columns]
    curve = table.curve and vars(table.curve)
    return {**vars(table), "columns": columns, "frame": table.rows, "curve": curve}


def _table(data: Mapping[str, Any]) -> Table:
    import pandas

    columns = tuple(Column(**column, compute=itemgetter(column["key"])) for column in data["columns"])
    frame = pandas.DataFrame(data["frame"], columns=[column.key for column in columns], dtype=object)
    notes, lead, details = (tuple(data[name]) for name in ("notes", "lead", "details"))
    curve = Curve(**data["curve"]) if data["curve"] else None
    code = tuple((heading, text) for heading, text in data["code"])
    return Table(data["title"], columns, frame, notes, lead, curve, code, details)
