"""Creates temporary files and folders; the next command removes what a killed process has left.

Each is locked by its process, and the kernel ends a lock with the process that holds it. The name tells the start of
the machine, since locks are known to the processes of one kernel only: what other machines make on a shared file system
is left alone, and so is what cannot be locked, is another user's, or is a link.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LOCK = ".lock"
_PREFIX = "actbench-"
_FORM = re.compile(rf"(?:{_PREFIX}|\..*\.)([0-9a-f]{{8}})-[0-9a-f]{{8}}(?:|\.partial|\.tmp)")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder in the temporary folder that only this user may enter; remove it at the end of the block."""
    root = Path(tempfile.gettempdir())
    sweep(root)
    folder = root / f"{_PREFIX}{_mark()}"
    folder.mkdir(mode=0o700)
    with _removed_in_the_end(folder):
        yield folder


@contextmanager
def folder_next_to(target: Path) -> Iterator[Path]:
    """Create a folder next to ``target``, which it may replace (:func:`unmark`); remove it if it is still there."""
    sweep(target.parent)
    folder = target.with_name(f".{target.name[:32]}.{_mark()}.partial")
    folder.mkdir()
    with _removed_in_the_end(folder):
        yield folder


@contextmanager
def file_next_to(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file next to ``target``, which it may replace; yield path and file, and remove it if still there."""
    sweep(target.parent)
    path = target.with_name(f".{target.name[:32]}.{_mark()}.tmp")
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        try:
            path = _named(file.fileno(), new, path)
            yield path, file
        finally:
            for place in (new, path):
                place.unlink(missing_ok=True)


def unmark(folder: Path) -> None:
    """Remove the lock of a folder that has replaced its target: it is not temporary any more."""
    (folder / _LOCK).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes of this user left in a folder since this machine was started."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            form = _FORM.fullmatch(entry.name)
            if form is not None and form[1] == _start():
                with suppress(OSError):  # its process lives; another one sweeps, too
                    _remove_unless_held(Path(entry.path), entry.stat(follow_symlinks=False))


def _remove_unless_held(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return
    is_folder = stat.S_ISDIR(found.st_mode)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path / _LOCK if is_folder else path, flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


@contextmanager
def _removed_in_the_end(folder: Path) -> Iterator[None]:
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)  # gone if it was moved to its place
        new = folder / f"{_LOCK}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        ends.callback(os.close, descriptor)
        if _named(descriptor, new, folder / _LOCK) == new:
            new.unlink()
        yield


def _named(descriptor: int, new: Path, path: Path) -> Path:
    """Lock a new file and then give it the name that others look for; return its name, the old one without a lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # the file system has no locks
        return new
    new.rename(path)
    return path


def _mark() -> str:
    return f"{_start()}-{secrets.token_hex(4)}"


@functools.cache
def _start() -> str:
    """Return what identifies this boot of this machine."""
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        told = secrets.token_bytes()  # then nothing is ever swept
    return hashlib.sha256(told).hexdigest()[:8]
