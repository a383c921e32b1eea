"""What a user's script prints, from the process that runs it to the streams of the command, while it runs."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from threading import Event, Thread
from typing import Final, TextIO

from actbench.tempfiles import temporary_folder

_NAMES: Final = ("out", "err")
_LOOK_SECONDS: Final = 0.05
_AT_ONCE_BYTES: Final = 2**20


@contextmanager
def printing_to(folder: str) -> Iterator[None]:
    """Inside, standard output and error of this process, and of those that it starts, go to two files of a folder."""
    before = [(number, os.dup(number)) for number in (1, 2)]
    _flush()
    for (number, _), name in zip(before, _NAMES, strict=True):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # who reads along waits for each line
    try:
        yield
    finally:
        _flush()
        for number, own in before:
            os.dup2(own, number)
            os.close(own)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced it
            stream.flush()


@contextmanager
def passed_on(out: TextIO, err: TextIO) -> Iterator[Path]:
    """Yield a folder for :func:`printing_to`; what comes there is written to two streams until the block ends."""
    with temporary_folder() as folder:
        for name in _NAMES:
            (folder / name).touch(mode=0o600)
        with open(folder / _NAMES[0], "rb") as printed, open(folder / _NAMES[1], "rb") as warned:
            ended = Event()
            pairs = [_Pair(printed, out), _Pair(warned, err)]
            thread = Thread(target=_follow, args=(pairs, ended), daemon=True)
            thread.start()
            try:
                yield folder
            finally:
                ended.set()
                thread.join()


class _Pair:
    """A file that grows, and the stream that gets what is new in it."""

    def __init__(self, file: BufferedReader, stream: TextIO) -> None:
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy(self, *, final: bool = False) -> bool:
        """Copy a part of the new output, and return whether there may be more."""
        new = self._file.read(_AT_ONCE_BYTES)
        if text := self._decoder.decode(new, final and not new):
            self._stream.write(text)
            self._stream.flush()
        return bool(new)


def _follow(pairs: Sequence[_Pair], ended: Event) -> None:
    while not ended.wait(_LOOK_SECONDS):
        for pair in pairs:
            pair.copy()
    for pair in pairs:
        while pair.copy(final=True):
            pass
