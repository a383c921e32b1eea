"""Ends of a command that nobody would notice: ``os._exit`` in code that the command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

FAILED = 2


@contextmanager
def noticed() -> Iterator[None]:
    """Make ``os._exit`` say who called it, and leave with status 2, while a command runs.

    A model's file, a loss or a callback may call it, and a command would end in the middle with status 0 and no word.
    Processes that are forked meanwhile end by it as ever.
    """
    own, process = os._exit, os.getpid()

    def leave(status: int) -> Any:
        if os.getpid() != process:
            own(status)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it may be closed
                stream.flush()
        with suppress(Exception):
            print(f"actbench: {place} called os._exit({status}): the command ended there", file=sys.stderr, flush=True)
        own(FAILED)

    setattr(os, "_exit", leave)  # noqa: B010  (type checkers know that it is no ordinary function)
    try:
        yield
    finally:
        setattr(os, "_exit", own)  # noqa: B010
