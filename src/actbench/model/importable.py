"""The files of Python that a script imports from its folder, found without running it."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from actbench.paths import MOST_BYTES, digest, read_bytes
from actbench.units import MIB

MOST_FILES: Final = 2000
"""Files of Python that may be imported, those nearest to the script first."""
MOST_ENTRIES: Final = 20_000
"""Files and folders that are looked at; a folder with more than are left is one of data and is skipped."""

_LONGEST_SCRIPT: Final = 16 * MIB
_NOT_IMPORTED: Final = ("__pycache__", "site-packages", "node_modules")

_BY_NAME: Final = frozenset(
    ("builtins", "gin", "hydra", "imp", "importlib", "jsonargparse", "mmengine", "pkgutil", "pydoc", "runpy")
)
"""Modules that import others by names that only a run knows; so do ``eval``, ``exec``, ``__import__`` and torch.hub."""
_OTHERWISE: Final = frozenset(("importlib.metadata", "importlib.resources"))
"""Modules of theirs that import none."""

_Name = tuple[str, ...]
"""The parts of a module's dotted name."""


def with_imported(found: str, script: str, folder: str) -> str:
    """Return the digest of a script together with those of the files below a folder that it imports, directly or not.

    Imports are read from the code. Where code imports by names that only a run knows, or cannot be parsed, all ``.py``
    files below the folder count. If none counts, that is the digest of the script alone. Left out are links, hidden
    folders, virtual environments (their libraries are no part of a case), and files of more than :data:`MOST_BYTES`.

    Args:
        found: Digest of the script alone.
        script: Its path.
        folder: Where Python looks first for what it imports.
    """
    own, folder = os.path.realpath(script), os.path.realpath(folder)
    files = _Files(folder, [path for path in islice(_sources(folder), MOST_FILES + 1) if path != own][:MOST_FILES])
    lines = [f"{os.path.relpath(path, folder)!r} {digest(path)}\n" for path in files.imported_by(own)]
    return hashlib.sha256("".join([found, *lines]).encode()).hexdigest()[: len(found)] if lines else found


class _Files:
    """Files that may be imported, and their names as modules of the folder."""

    def __init__(self, folder: str, paths: Sequence[str]) -> None:
        self._folder, self._paths = folder, paths
        self._by_name = {self._name(path): path for path in paths}
        self._by_end: dict[_Name, list[str]] = defaultdict(list)
        for name, path in self._by_name.items():
            for first in range(len(name)):
                self._by_end[name[first:]].append(path)

    def imported_by(self, script: str) -> Sequence[str]:
        """Return the files that a script imports, directly or not, in a fixed order."""
        seen = {script}
        waiting = deque(seen)
        while waiting:
            path = waiting.popleft()
            try:
                read = set(self._imported(path, _parsed(path)))
            except _UnknownNamesError:
                return self._paths
            waiting.extend(sorted(read - seen))
            seen |= read
        return sorted(seen - {script})

    def _name(self, path: str) -> _Name:
        parts = tuple(os.path.relpath(path, self._folder).removesuffix(".py").split(os.sep))
        return parts[:-1] if parts[-1] == "__init__" else parts

    def _imported(self, path: str, tree: ast.AST) -> Iterator[str]:
        """Yield the files that the code of a file imports; packages around a module are imported first."""
        package = tuple(os.path.relpath(os.path.dirname(path), self._folder).split(os.sep))
        package = () if package == (".",) else package
        yield from self._found(package)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._found(tuple(alias.name.split(".")))
            elif isinstance(node, ast.ImportFrom):
                module = tuple(node.module.split(".")) if node.module else ()
                base = (*package[: len(package) + 1 - node.level], *module) if node.level else module
                for alias in node.names:
                    yield from self._all_in(base) if alias.name == "*" else self._found((*base, alias.name))

    def _found(self, name: _Name) -> Iterator[str]:
        """Yield the files of a module and of the packages around it.

        A name that is not in the folder itself may be in one below it, which ``sys.path`` also has.
        """
        for end in range(1, len(name) + 1):
            part = name[:end]
            if part in self._by_name:
                yield self._by_name[part]
            elif name[0] not in sys.stdlib_module_names:
                yield from self._by_end.get(part, ())

    def _all_in(self, package: _Name) -> Iterator[str]:
        """Yield the files that ``from package import *`` may import."""
        yield from self._found(package)
        for name, path in self._by_name.items():
            if len(name) > len(package) and name[:-1][-len(package) :] == package:
                yield path


class _UnknownNamesError(Exception):
    """Nobody can tell from a file what it imports."""


def _parsed(path: str) -> ast.AST:
    """Return the code of a file; an error if it imports by names that only a run knows."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the code itself gives them
            tree = ast.parse(read_bytes(Path(path), _LONGEST_SCRIPT))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise _UnknownNamesError from None
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(
            name.partition(".")[0] in _BY_NAME and ".".join(name.split(".")[:2]) not in _OTHERWISE for name in names
        ):
            raise _UnknownNamesError
        by_name = isinstance(node, ast.Name) and node.id in ("__import__", "eval", "exec", "LightningCLI")
        if by_name or (isinstance(node, ast.Attribute) and node.attr in ("hub", "LightningCLI")):
            raise _UnknownNamesError
    return tree


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
