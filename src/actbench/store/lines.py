"""The lines of a results file, as bytes: split, read as records, and added to without ever leaving half a line."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from actbench.errors import StoreError
from actbench.mistakes import dotted
from actbench.records import SCHEMA_VERSION, Data, Record

Kind = TypeVar("Kind", bound=Data)

_BEGINNING = b'{"schema_version":'

Migrations = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""By schema version: turns a record of that version into one of the next."""


@dataclass(frozen=True)
class Lines:
    """The lines of a file.

    Attributes:
        numbered: Whole lines that are not blank, with their numbers from 1.
        notice: That a half-written line follows them, for the user; None where none does.
        whole_bytes: Length of the file without the half-written line.
        file_bytes: Length of the file.
    """

    numbered: tuple[tuple[int, bytes], ...]
    notice: str | None
    whole_bytes: int
    file_bytes: int


def split(path: Path) -> Lines:
    """Split a file into lines.

    Only what follows the last newline can be half-written, and only where it is the beginning of a record: what else
    stands there was not left by a killed process, and nothing is thrown away for it.

    Raises:
        StoreError: The file cannot be read, or what follows its last newline is no beginning of a record.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise StoreError(f"{path} is not a file that holds results")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the results cannot be read: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    last = content.rpartition(b"\n")[2]
    if not last.strip() or _is_json(last):
        return Lines(tuple(numbered), notice=None, whole_bytes=len(content), file_bytes=len(content))
    number, _ = numbered.pop()
    begun = last.rstrip(b"\0")  # which a crashed machine leaves where the disk did not get the bytes in time
    if not (begun.startswith(_BEGINNING) or (_BEGINNING.startswith(begun) and (begun or numbered))):
        raise StoreError(f"{path}:{number}: this is not a record of actbench; is {path.name} a results file?")
    if begun and not _is_cut_short(begun):
        raise StoreError(f"{path}:{number}: {_broken(last)}")
    notice = (
        f"{path}: its last line was left half-written (a killed process does this) and is not read; before the next "
        f"row is written it is moved to {torn_path(path).name}"
    )
    return Lines(tuple(numbered), notice, whole_bytes=len(content) - len(last), file_bytes=len(content))


def parse(line: bytes, place: str) -> Record:
    """Read a line as a record; one of an older schema version is brought to the present one.

    Args:
        line: JSON.
        place: Name of the file and number of the line, for the message.

    Raises:
        StoreError: The line is broken or was written by a newer actbench.
    """
    return parse_as(Record, line, place, SCHEMA_VERSION, MIGRATIONS)


def parse_as(kind: type[Kind], line: bytes, place: str, version: int, migrations: Migrations) -> Kind:
    """Read a line as a record of any kind.

    Args:
        kind: Class of the record.
        line: JSON.
        place: Name of the file and number of the line, for the message.
        version: The present schema version of this kind.
        migrations: As ``MIGRATIONS``, for this kind.

    Raises:
        StoreError: The line is broken or was written by a newer actbench.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        pass  # below it is found out why: an older version is no mistake
    if not _is_json(line):
        if not line.lstrip().startswith(b"{"):
            raise StoreError(f"{place}: this is not a record of actbench; is it a results file?")
        raise StoreError(f"{place}: {_broken(line)}")
    try:
        return kind.model_validate(_migrated(from_json(line), place, version, migrations))
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(
            f"{place}: not a valid record: {dotted(first['loc'])}: {first['msg']}. Remove the line, and its case is "
            f"measured again, or restore the file"
        ) from None


def _migrated(data: Any, place: str, present: int, migrations: Migrations) -> dict[str, Any]:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise StoreError(f"{place}: this is not a record of actbench: it has no schema_version")
    if version > present:
        raise StoreError(
            f"{place}: written by a newer actbench (schema version {version}, this one knows {present}): "
            f"read it with that one, or install it here"
        )
    while version < present:
        if version not in migrations:
            raise StoreError(f"{place}: there was never a schema version {version}; the line is broken")
        data = migrations[version](data)
        version += 1
    return dict(data)


def _is_json(line: bytes) -> bool:
    try:
        from_json(line)
    except ValueError:
        return False
    return True


def _is_cut_short(line: bytes) -> bool:
    """Return whether a line is the first bytes of some JSON, as a killed process leaves them."""
    try:  # the cut may go through a character
        text = codecs.getincrementaldecoder("utf-8")().decode(line)
    except UnicodeDecodeError:
        return False
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return not _begins_with_whole(text)


def _begins_with_whole(text: str) -> bool:
    """Return whether a text is a JSON value and something after it, which reading in part does not tell."""
    try:
        json.JSONDecoder().raw_decode(text)
    except ValueError:
        return False
    return True


def _broken(line: bytes) -> str:
    if b"}\r" + _BEGINNING in line:
        return "its lines end with a carriage return alone: end them with a newline, and nothing is lost"
    if b"}" + _BEGINNING in line:
        return "two records stand on one line: put a newline between them, and nothing is lost"
    return "the line is broken (not JSON). Remove it, and its case is measured again, or restore the file"


class LineFile:
    """A file that lines are added to. Its length is known, so that another writer is noticed.

    Args:
        path: The file; made by the first line.
        whole_bytes: Length up to the end of the last whole line. Before the next is added, what follows is moved to
            the end of a file beside this one, whose name ends with ``.torn``.
        file_bytes: Length of the file.
    """

    def __init__(self, path: Path, whole_bytes: int = 0, file_bytes: int = 0) -> None:
        self.path = path
        self.whole_bytes = whole_bytes
        self.file_bytes = file_bytes

    def append(self, line: bytes) -> None:
        """Add a line, without its end, and wait until the disk has it.

        Raises:
            StoreError: It cannot be written, or another program changed the file. No part of the line stays behind.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._append(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"{self.path}: the record cannot be written: {error.strerror}. The records before it are safe; make "
                f"room or name another file with --output, and start again: what is there is not measured twice"
            ) from error

    def _append(self, descriptor: int, line: bytes) -> None:
        if os.fstat(descriptor).st_size != self.file_bytes:
            raise StoreError(
                f"{self.path}: another program changed the file while actbench was writing to it; nothing was written. "
                f"Look at the file, then start again"
            )
        self._set_aside(descriptor)
        unended = self.whole_bytes > 0 and os.pread(descriptor, 1, self.whole_bytes - 1) != b"\n"
        content = (b"\n" if unended else b"") + line + b"\n"
        try:
            _write(descriptor, content, self.whole_bytes)
            if self.whole_bytes == 0:
                _sync_folder(self.path.parent)
        except BaseException:
            with suppress(OSError):  # what cannot be cut off now is a half-written line, which readers leave out
                os.ftruncate(descriptor, self.whole_bytes)
            raise
        self.whole_bytes = self.file_bytes = self.whole_bytes + len(content)

    def _set_aside(self, descriptor: int) -> None:
        torn = os.pread(descriptor, self.file_bytes - self.whole_bytes, self.whole_bytes)
        if torn.strip():
            aside = os.open(torn_path(self.path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                _write(aside, torn + b"\n", os.fstat(aside).st_size)
                _sync_folder(self.path.parent)
            finally:
                os.close(aside)
        os.ftruncate(descriptor, self.whole_bytes)
        self.file_bytes = self.whole_bytes


def torn_path(path: Path) -> Path:
    """Return where the half-written lines of a results file are put."""
    return path.with_name(f"{path.name}.torn")


def _write(descriptor: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the name of a new file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
