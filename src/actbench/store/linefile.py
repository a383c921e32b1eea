"""A results file that is written to, line by line, without ever leaving half a line."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from actbench.errors import StoreError


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
