"""Standard output, standard error and the end of a command, as commands need them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO, cast


class Tolerant:
    """A stream that remembers the first error of writing and drops what is written after it.

    Args:
        stream: Where to write.

    Attributes:
        error: The first error, or None.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Let what is buffered go nowhere: Python would try again at its end, and complain."""
        self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(io.UnsupportedOperation, ValueError):  # a stream without a file
            os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def tolerant() -> Iterator[Tolerant]:
    """Put tolerant streams in the place of standard output and error, and give that of the output."""
    streams = sys.stdout, sys.stderr
    with ExitStack() as opened:
        # A stream that whoever started the command closed is None.
        written = [one or opened.enter_context(open(os.devnull, "w")) for one in streams]
        for one in written:
            opened.enter_context(_replacing(one))
        out, err = map(Tolerant, written)
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield out
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = streams


@contextmanager
def _replacing(stream: TextIO) -> Iterator[None]:
    """Let a stream write ``?`` for characters that its encoding lacks."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors=before)


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
