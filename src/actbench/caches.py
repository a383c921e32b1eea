"""Locates files that are kept between runs: in the user's cache, or where no other user can write."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import platformdirs

from actbench.errors import UsageError


def user_cache() -> Path:
    """Return the folder for what is kept between runs, which may not be there yet.

    Raises:
        UsageError: Nobody knows the user's home, and no folder can be made instead.
    """
    with suppress(RuntimeError):  # there is no HOME, and no entry in passwd
        folder = platformdirs.user_cache_path("actbench")
        if folder.is_absolute():
            return folder
    return own_temporary_folder() / "cache"


def own_temporary_folder() -> Path:
    """Return the folder of this user in the temporary folder, which no other user may enter; create it if needed.

    Raises:
        UsageError: It cannot be made, or what has its name is another's or open to others.
    """
    elsewhere = "let TMPDIR name another place, or XDG_CACHE_HOME one for caches"
    folder = Path(f"actbench-of-{os.getuid()}")
    try:
        folder = Path(tempfile.gettempdir()) / folder
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}; {elsewhere}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} is not a folder of yours alone (mode 700): remove it, or {elsewhere}")
    return folder


def keep_compiled_code_private() -> None:
    """Let torch store compiled code in the user's cache, or in a folder of ours where that cannot be written.

    Left alone, it reads pickles from a folder in the temporary folder whose name anybody can tell.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    try:
        folder = user_cache()
        there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        if not os.access(there, os.W_OK | os.X_OK):
            folder = own_temporary_folder()
    except UsageError:
        folder = Path(tempfile.mkdtemp(prefix="actbench-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
