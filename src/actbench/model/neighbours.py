"""Modules beside a user's own file, for the code of that folder alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

from actbench.errors import is_users

_OF_IMPORTS = ("<frozen importlib", "importlib/__init__.py", "importlib/util.py", "importlib\\__init__.py")


class _Neighbours:
    """Finds modules in a folder, after all other finders, if code of the same folder imports them.

    The folder is not on ``sys.path``: there, what stands beside a user's file would be imported by torch or any other
    package that looks for an optional one of that name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module beside the file whose code imports it; None for other importers."""
        if path is not None or not self._is_here(_importer(sys._getframe(1))):
            return None
        return PathFinder.find_spec(name, [str(self.folder)], target)

    def _is_here(self, file: str | None) -> bool:
        if file is None or not is_users(file):
            return False
        return Path(file).resolve().is_relative_to(self.folder)


def _importer(frame: FrameType | None) -> str | None:
    """Return the file whose code imports, at or above a frame."""
    while frame is not None and any(part in frame.f_code.co_filename for part in _OF_IMPORTS):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename


def find_neighbours_of(file: Path) -> None:
    """Let the code of a user's file, and of the files below its folder, import what stands in that folder.

    It does so whenever it runs: while the file is imported, and in functions that are called later. Installed packages
    come first, and no other code imports anything from there.
    """
    folder = file.resolve().parent
    if not any(isinstance(each, _Neighbours) and each.folder == folder for each in sys.meta_path):
        sys.meta_path.append(_Neighbours(folder))
