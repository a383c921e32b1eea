"""Standard output and standard error as commands need them: what cannot be written there stops no work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


class Tolerant:
    """A stream that remembers the first error of writing and drops what is written after it.

    Args:
        stream: Where to write. Characters that its encoding lacks are written as ``?``.

    Attributes:
        error: The first error, or None.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

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
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def tolerant() -> Iterator[Tolerant]:
    """Put tolerant streams in the place of standard output and error, and give that of the output."""
    out, err = sys.stdout, sys.stderr
    given = Tolerant(out)
    sys.stdout, sys.stderr = cast("TextIO", given), cast("TextIO", Tolerant(err))
    try:
        yield given
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = out, err
