"""Finds the lines of a results file, and reads them as records."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from actbench.errors import StoreError
from actbench.model.records import SCHEMA_VERSION, Migrations, Record
from actbench.report.linefile import torn_path
from actbench.units import MIB, format_bytes
from actbench.validation import dotted

RecordT = TypeVar("RecordT", bound=Record[Any, Any])

_BEGINNING = b'{"schema_version":'
_BLOCK = 2**16  # bytes that are read at a time from the end of a file
LONGEST: Final = 64 * MIB
"""Most bytes of a line: a record with the sites and warnings of a model of 100,000 layers has less than half of it."""


@dataclass(frozen=True)
class Lines:
    """The lines of a file, read one by one: a file may be larger than the memory.

    ``notice`` tells the user that a half-written line follows the whole ones.
    """

    path: Path
    notice: str | None
    whole_bytes: int
    file_bytes: int

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield the whole lines that are not blank, without their ends and with their numbers from 1."""
        return ((number, line) for number, line in _numbered(self.path, self.whole_bytes) if line.strip())


def split(path: Path) -> Lines:
    """Find the lines of a file.

    Only the text after the last newline can be half-written, and only if it begins like a record. A killed process
    leaves nothing else there, so any other text is an error and is not thrown away.

    Raises:
        StoreError: The file cannot be read, or the text after its last newline does not begin like a record.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise StoreError(f"{path} is not a file that holds results")
    file_bytes, last = _last(path)
    if not last.strip() or _is_json(last):
        return Lines(path, notice=None, whole_bytes=file_bytes, file_bytes=file_bytes)
    whole = Lines(path, notice=None, whole_bytes=file_bytes - len(last), file_bytes=file_bytes)
    begun = last.rstrip(b"\0")  # a crashed machine leaves zero bytes where the disk did not get the data in time
    if not begun.startswith(_BEGINNING) and not (_BEGINNING.startswith(begun) and (begun or any(whole.numbered()))):
        raise StoreError(f"{_place_after(whole)}: this is not a record of actbench; is {path.name} a results file?")
    if begun and not _is_cut_short(begun):
        raise StoreError(f"{_place_after(whole)}: {_broken(last)}")
    notice = (
        f"{path}: its last line was left half-written (a killed process does this) and is not read; before the next "
        f"row is written it is moved to {torn_path(path).name}"
    )
    return replace(whole, notice=notice)


def _last(path: Path) -> tuple[int, bytes]:
    """Return the length of a file and the bytes after its last newline."""
    with _opened(path) as file:
        start = file_bytes = os.fstat(file.fileno()).st_size
        last = b""
        while start and b"\n" not in last:
            if len(last) > LONGEST:
                raise _too_long(path)
            step = max(_BLOCK, len(last))
            start, end = max(0, start - step), start
            file.seek(start)
            last = file.read(end - start) + last
    return file_bytes, last.rpartition(b"\n")[2]


def _numbered(path: Path, length: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines in the first ``length`` bytes of a file, which another process may be extending."""
    with _opened(path) as file:
        number = 0
        while length > 0 and (line := file.readline(LONGEST + 1)):
            number += 1
            size = len(line)
            if size > LONGEST:
                raise _too_long(f"{path}:{number}")
            whole = line[:length]
            yield number, whole[:-1] if whole[-1:] == b"\n" else whole
            length -= size


def _too_long(place: Path | str) -> StoreError:
    return StoreError(
        f"{place}: a line has more than {format_bytes(LONGEST)}, and no record has; is it a results file?"
    )


def _place_after(lines: Lines) -> str:
    """Return the name of the file and the number of the line after the whole ones."""
    return f"{lines.path}:{1 + sum(1 for _ in _numbered(lines.path, lines.whole_bytes))}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StoreError(f"{path}: the results cannot be read: {error.strerror}") from None


def parse_record(kind: type[RecordT], line: bytes, place: str, shared: dict[Any, Any] | None = None) -> RecordT:
    """Read a line as a record, migrating older schema versions; ``place`` is for messages.

    Records that are read with the same ``shared`` have equal parts in common.

    Raises:
        StoreError: The line is broken or was written by a newer actbench.
    """
    with suppress(ValidationError):  # the code below finds the reason: an older version is no error
        return kind.model_validate_json(line, context=shared)
    try:
        data = from_json(line)
    except ValueError:
        if not line.lstrip().startswith(b"{"):
            raise StoreError(f"{place}: this is not a record of actbench; is it a results file?") from None
        raise StoreError(f"{place}: {_broken(line)}") from None
    return record_of(kind, data, place, shared)


def record_of(kind: type[RecordT], data: Any, place: str, shared: dict[Any, Any] | None = None) -> RecordT:
    """Return the record that JSON values make, migrating older schema versions; ``place`` is for messages.

    Raises:
        StoreError: They are no record of this kind, or one of a newer actbench.
    """
    try:
        return kind.model_validate(_migrated(data, place, kind.migrations), context=shared)
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(
            f"{place}: not a valid record: {dotted(first['loc'])}: {first['msg']}. Remove the line, and its case is "
            f"measured again, or restore the file"
        ) from None


def first_data(path: Path) -> Any:
    """Return the first record of a results file, of whatever kind, as JSON values; None if it holds none."""
    with suppress(StoreError, ValueError):
        _, first = next(split(path).numbered(), (0, b""))
        return from_json(first)
    return None


def _migrated(data: Any, place: str, migrations: Migrations) -> dict[str, Any]:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise StoreError(f"{place}: this is not a record of actbench: it has no schema_version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{place}: written by a newer actbench (schema version {version}, this one knows {SCHEMA_VERSION}): "
            f"read it with that one, or install it here"
        )
    while version < SCHEMA_VERSION:
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
    """Return whether a line is the beginning of JSON, as a killed process leaves it."""
    try:  # the cut may be inside a character
        text = codecs.getincrementaldecoder("utf-8")().decode(line)
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return not _begins_with_whole(text)


def _begins_with_whole(text: str) -> bool:
    """Return whether a text begins with a whole JSON value, which ``allow_partial`` does not tell."""
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
