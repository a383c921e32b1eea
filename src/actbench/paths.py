"""Paths that a user names: those of a home, and whether something can be made where they lead."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from actbench.errors import StoreError, UsageError

LONGEST_NAME = 200
"""Characters of a file name that is made of other names; file systems take 255 bytes, and suffixes are added."""


def from_home(text: str) -> Path:
    """Return a path, with the home of a user in the place of ``~`` or ``~name`` at its beginning.

    Raises:
        UsageError: There is no user of this name.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text!r}: nobody here is called {text.split('/')[0]!r}; write ./{text} for a file") from None


def check_makeable(path: Path) -> None:
    """Check as far as can be told beforehand that a file or folder can be made, or be replaced.

    Raises:
        StoreError: It is a link to nothing, its name is too long, or the folder that it would be in is none or cannot
            be written.
    """
    try:
        if os.path.islink(path) and not os.path.exists(path):
            raise StoreError(f"{path} is a link to {os.readlink(path)}, where nothing is: remove it or name another")
        target = path.resolve()
        target.exists()  # raises where a name in it is too long
        folder = next(parent for parent in target.parents if parent.exists())
        if not folder.is_dir():
            raise StoreError(f"{target} cannot be written: {folder} is no folder")
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; name another place") from None
    except (RuntimeError, ValueError) as error:  # links that lead to each other; a zero byte
        raise StoreError(f"{path} cannot be written: {error}") from None
