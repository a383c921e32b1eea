"""The files of Python that a script may import from its folder."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from actbench.paths import MOST_BYTES, digest

MOST_FILES: Final = 2000
"""Files of Python that are read, those nearest to the script first."""
MOST_ENTRIES: Final = 20_000
"""Files and folders that are looked at; a folder with more than are left is one of data and is skipped."""

_NOT_IMPORTED: Final = ("__pycache__", "site-packages", "node_modules")


def with_importable(found: str, script: str, folder: str) -> str:
    """Return the digest of a script together with those of the other ``.py`` files below a folder.

    Without other files, that is the digest of the script alone. Left out are links, hidden folders, virtual
    environments (their libraries are no part of a case), and files of more than :data:`MOST_BYTES`.

    Args:
        found: Digest of the script alone.
        script: Its path.
        folder: Where Python looks first for what it imports.
    """
    own = os.path.realpath(script)
    others = (path for path in _sources(os.path.realpath(folder)) if path != own)
    lines = [f"{os.path.relpath(path, folder)!r} {digest(path)}\n" for path in islice(others, MOST_FILES)]
    return hashlib.sha256("".join([found, *lines]).encode()).hexdigest()[: len(found)] if lines else found


def _sources(folder: str) -> Iterator[str]:
    """Yield the files of Python below a folder, by depth and then by name."""
    folders, left = deque([folder]), MOST_ENTRIES
    while folders:
        inside = _entries(folders.popleft(), left)
        left -= len(inside)
        if any(entry.name == "pyvenv.cfg" for entry in inside):
            continue
        shown = [entry for entry in inside if not entry.name.startswith(".") and entry.name not in _NOT_IMPORTED]
        folders.extend(entry.path for entry in shown if entry.is_dir(follow_symlinks=False))
        yield from (entry.path for entry in shown if entry.name.endswith(".py") and _is_small_file(entry))


def _is_small_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size <= MOST_BYTES
    except OSError:
        return False


def _entries(folder: str, most: int) -> list[os.DirEntry[str]]:
    """Return what a folder holds, by name; nothing if it cannot be read or holds more than ``most``."""
    try:
        with os.scandir(folder) as found:
            inside = list(islice(found, most + 1))
    except OSError:
        return []
    return sorted(inside, key=lambda entry: entry.name) if len(inside) <= most else []
