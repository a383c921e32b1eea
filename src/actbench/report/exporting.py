"""Formats of files that commands write, which plug-ins bring as ``actbench.exports``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actbench.model.records import Record
    from actbench.report.render.exports import Text
    from actbench.report.tables import Table


@dataclass(frozen=True)
class Exported:
    """What a command writes to files.

    Attributes:
        tables: The tables, below each other.
        title: The heading above all of them.
        records: The records that the first table shows, of one kind; empty if it shows none.
        remark: Tells the user something on standard error.
    """

    tables: Sequence[Table]
    title: str
    records: Sequence[Record[Any, Any]]
    remark: Callable[[str], None]


@dataclass(frozen=True)
class Curves:
    """How a format draws curves: the memory over the steps of cases, or the losses of training runs.

    Attributes:
        suffixes: Of the files that it writes, such as ``.png``.
        check: Raises a UsageError, before anything runs, if a file of this suffix cannot be written here.
        text: From a suffix, and what is written, to the text of the file or its bytes.
    """

    suffixes: tuple[str, ...]
    check: Callable[[str], None]
    text: Callable[[str, Exported], Text]


@dataclass(frozen=True)
class ExportFormat:
    """A format of files: what an entry point of ``actbench.exports`` names.

    The entry point ``pdf`` makes the flag ``--export-pdf`` of every command that writes a table.

    Attributes:
        about: What the flag does, for ``--help``.
        text: From what is written to the text of the file, or its bytes.
        also: Another name of the flag, such as ``--pdf``.
        curves: How it draws the memory over a step; None if it does not.
        peak: How it draws who holds the peaks of records with timelines, for ``--export-flamegraph``; None if it does
            not.
        extras: Extras of its package that some of it needs, each with what it is for.
    """

    about: str
    text: Callable[[Exported], Text]
    also: str = ""
    curves: Curves | None = None
    peak: Callable[[Exported], Text] | None = None
    extras: Mapping[str, str] = field(default_factory=dict)
