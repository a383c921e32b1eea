"""Paths that a user names, and files that are not trusted."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from actbench.errors import ActbenchError, StoreError, UsageError
from actbench.tempfiles import file_next_to
from actbench.units import MIB, format_bytes

_LONGEST_NAME = 200  # file systems take 255 bytes, and suffixes are added


def from_home(text: str) -> Path:
    """Return a path with ``~`` or ``~name`` at its beginning replaced by the home of the user.

    Raises:
        UsageError: There is no user of this name.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r}: there is no user {text.split('/')[0]!r}; write ./{text} for a file") from None


def away_from_here() -> AbstractContextManager[None]:
    """Make another folder the current one for a while, for libraries that take what lies there for their own.

    It is that of Python's own library: it is on every import path, and only the system writes there.
    """
    return chdir(sysconfig.get_path("stdlib"))


def file_name(text: str) -> str:
    """Turn a name into one for a file or folder: no separators, no dots at the ends, never empty."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:_LONGEST_NAME].strip("-.") or "unnamed"


def check_makeable(path: Path) -> None:
    """Check, as far as possible beforehand, that a file or folder can be made or replaced.

    Raises:
        StoreError: The path is a link to nothing, its name is too long, or its parent is not a folder or cannot be
            written.
    """
    try:
        if os.path.islink(path) and not os.path.exists(path):
            raise StoreError(f"{path} is a link to {os.readlink(path)}, where nothing is: remove it or name another")
        target = path.resolve()
        target.exists()  # raises if a name in the path is too long
        folder = next(parent for parent in target.parents if parent.exists())
        if not folder.is_dir():
            raise StoreError(f"{target} cannot be written: {folder} is not a folder")
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; name another place") from None
    except (RuntimeError, ValueError) as error:  # links that lead to each other; a zero byte
        raise StoreError(f"{path} cannot be written: {error}") from None


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Args:
        path: A regular file, or a link to one.
        most_bytes: Largest size allowed.

    Raises:
        OSError: The file cannot be read, is larger, or is not a regular file, as a pipe or a device.
    """
    with _opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return content


def digest(path: str | Path) -> str | None:
    """Return the beginning of the SHA-256 of a regular file; None if it cannot be read."""
    try:
        with _opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (OSError, ValueError):
        return None


@contextmanager
def _opened(path: str | Path) -> Iterator[BufferedReader]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


MOST_BYTES = MIB
"""Largest file that a user writes by hand: a recipe, a device profile, a file of Python."""
_DEEPEST = 50
_MOST_PARTS = 20  # of a dotted key
_TOML_TEXT = re.compile(
    r"\"{3}(?:\\.|[^\\])*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|\"(?:\\.|[^\"\\\n])*+\"?|'[^'\n]*+'?|\#[^\n]*+", re.DOTALL
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")
_MOST_BITS = 14_000  # Python writes no integer of more than 4,300 digits, and messages repeat what they refuse


def read_toml(path: Path, what: str, refused: type[ActbenchError]) -> dict[str, Any]:
    """Return what a TOML file of a user's holds; ``what`` names it in messages.

    Raises:
        refused: The file cannot be read, is not a regular file, has over :data:`MOST_BYTES`, is not TOML, or is nested
            deeper than any file of ours.
    """
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
        if _LONG_KEY.search(_TOML_TEXT.sub(lambda found: "#" if found[0].startswith("#") else "x", text)):
            # before it is parsed: the time and memory that this takes grow with the square of a key's length
            raise refused(f"{what} is nested too deeply: a key has more than {_MOST_PARTS} parts")
        data = tomllib.loads(text)
    except OSError as error:
        raise refused(f"{what} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise refused(f"{what} is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise refused(f"{what} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits is no TOMLDecodeError; a zero byte in the path
        raise refused(f"{what} is not valid TOML: {error}") from None
    level: list[Any] = [data]
    for _ in range(_DEEPEST):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in nested for item in (each.values() if isinstance(each, dict) else each)]
        if any(isinstance(each, int) and each.bit_length() > _MOST_BITS for each in level):  # 0xffff...
            raise refused(f"{what} holds an integer of thousands of digits")
    if level:
        raise refused(f"{what} is nested too deeply: more than {_DEEPEST} levels")
    return data


def write_whole(file: Path, content: bytes) -> None:
    """Write a file whole or not at all, so that no other process reads half of it.

    Raises:
        OSError: It cannot be written; nothing is left of it, and a file that was there stays.
    """
    with file_next_to(file) as (path, staged):
        staged.write(content)
        staged.flush()
        path.replace(file)
