"""Processes that end with another one, whatever session they moved to (Linux; elsewhere process groups do the work)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Container
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends; elsewhere closed leashes do that."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Make descendants children of this process when those between end, so that none gets away by a double fork."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(spared: Container[int] = ()) -> int:
    """Kill the children of this process, and return how many there were; none where the system does not list them.

    Their own children become those of this process when they end, if it adopts orphans.

    Args:
        spared: Ids of children that live on.
    """
    killed = 0
    with suppress(psutil.Error):
        for child in psutil.Process().children():  # type: ignore[no-untyped-call]
            if child.pid not in spared:
                with suppress(OSError):
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
    return killed
