"""Files of weights that a script writes, moves and removes: this run has not written its own, and older ones stay.

A script that removes its last checkpoint, to put into its place the new one that a simulated run does not write, would
be left without both.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actbench.device.patches import replaced
from actbench.tools.script.libraries.checkpoints import Contents


@contextmanager
def files_stay(contents: Contents) -> Iterator[None]:
    """Inside the block, move what files would hold as the script moves files, and leave older weights."""
    files = _Files(contents)
    changes = (
        (builtins, ("open",), files.opening),
        (io, ("open",), files.opening),
        (os, ("rename", "replace"), files.moving),
        (os, ("remove", "unlink"), files.removing),
        (shutil, ("rmtree",), files.removing_folders),
        (os, ("link",), files.copying),
        (shutil, ("copyfile", "copy", "copy2"), files.copying),
    )
    with ExitStack() as stack:
        for module, names, change in changes:
            for name in names:
                stack.enter_context(replaced(module, name, change))
        yield


class _Buffer(io.BytesIO):
    """What a script writes in place of a file that stays."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class _Files:
    """The changes of functions that write, move, copy and remove files.

    Args:
        contents: What files would hold that this run saved.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def _is_unwritten(self, path: Any) -> bool:
        return self._contents.has(path) and not os.path.exists(path)

    def opening(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" in mode and "b" in mode and self._contents.leaves(file):
                return _Buffer(os.fspath(file))
            return own(file, mode, *args, **options)

        return open_file

    def moving(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def move(src: Any, dst: Any, **options: Any) -> Any:
            is_real = not self._is_unwritten(src) and not self._contents.leaves(src)
            if options or is_real:  # a file that this run has written may replace an older one
                own(src, dst, **options)
            else:
                self._contents.leaves(dst)  # which is noted
            self._contents.move(src, dst)

        return move

    def removing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, **options: Any) -> None:
            if options or not (self._is_unwritten(path) or self._contents.leaves(path)):
                own(path, **options)
            self._contents.drop(path)

        return remove

    def removing_folders(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def rmtree(path: Any, *args: Any, **options: Any) -> None:
            inside = Path(path).rglob("*") if isinstance(path, str | os.PathLike) else ()
            if not any(map(self._contents.leaves, inside)):
                own(path, *args, **options)

        return rmtree

    def copying(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def copy(src: Any, dst: Any, *args: Any, **options: Any) -> Any:
            if not self._is_unwritten(src):
                return own(src, dst, *args, **options)
            place = os.path.join(dst, os.path.basename(src)) if os.path.isdir(dst) else dst
            self._contents.leaves(place)  # which is noted
            self._contents.copy(src, place)
            return place

        return copy
