"""A file that one process at a time holds, and that is gone when nobody does."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)


class TakenError(Exception):
    """Another process holds the file.

    Attributes:
        holder: Its id, where the file says it, or None.
    """

    def __init__(self, holder: int | None) -> None:
        super().__init__(f"process {holder} holds it")
        self.holder = holder


class LockFile:
    """A file whose lock, the kernel's own, ends with the process that holds it, whatever ends that.

    Who lets go of it takes the file away while holding the lock. So who gets the lock looks whether the file is still
    the one of that name, and asks again for the new one where it is not. A killed process leaves the file, free.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Hold the file, without waiting. Where the file system has no locks, nothing keeps others away.

        Raises:
            TakenError: Another process holds it.
            OSError: It cannot be made.
        """
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                self._lock(descriptor)
                if self._is_ours(descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                    self._descriptor, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def release(self) -> None:
        """Take the file away and let go of it; does nothing where it is not held."""
        if self._descriptor is not None:
            with suppress(OSError):  # a folder that is gone, or can no longer be written: the lock ends all the same
                os.unlink(self._path)
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).strip()
            raise TakenError(int(text) if text.isdigit() else None) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
