"""A results file that one process writes to, line by line, and never leaves with half a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from actbench.errors import StoreError
from actbench.paths import check_makeable


@dataclass
class LineFile:
    """A file that grows by lines; it knows its length, so that it notices another writer.

    Before it adds the next line, it moves bytes after the ``whole_bytes`` of whole lines to the end of another file,
    whose name ends with ``.torn``.
    """

    path: Path
    whole_bytes: int = 0
    file_bytes: int = 0

    def append(self, line: bytes) -> None:
        """Add a line, given without its newline, and sync the file.

        Raises:
            StoreError: The line cannot be written, or another program changed the file. No part of the line stays.
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
                f"room or name another file with --output, and start again: stored rows are not measured twice"
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
            with suppress(OSError):  # if this fails, a half-written line stays, which readers skip
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
    """Return the path for the half-written lines of a results file."""
    return path.with_name(f"{path.name}.torn")


def _write(descriptor: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Wait until the name of a new file is on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait_seconds: float = 0) -> Iterator[None]:
    """Hold the lock beside the file; missing folders are made.

    Raises:
        StoreError: Another process holds the lock until ``wait_seconds`` have passed, or the folder cannot be written.
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
        holder = _holder(lock_path)  # read first: some versions of filelock empty the file when they try to lock it
        lock.acquire(timeout=wait_seconds)
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
        with suppress(OSError):  # if the folder is gone or read-only, the lock still ends
            lock_path.unlink()
        lock.release()


def _holder(lock_path: Path) -> str:
    """Return the process that wrote the lock file, in parentheses, or an empty text."""
    try:
        text = lock_path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return f" (process {text})" if text.isdigit() else ""
