"""Reading files that anyone may have written: whole, but no pipe, no device, and not more than they may hold."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from actbench.units import format_bytes


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Args:
        path: A regular file, or a link to one.
        most_bytes: What it may hold.

    Raises:
        OSError: It cannot be read, is no regular file (a pipe would wait for ever, a device never end), or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return content
