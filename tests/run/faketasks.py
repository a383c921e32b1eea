"""Tasks for the tests of their runner: what is done is the name of the function, the text says with what."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

from actbench.errors import ConversionError


class RudeError(BaseException):
    def __str__(self) -> str:
        raise ValueError("no message")


def echo(text: str) -> str:
    return text


def frozen(text: str) -> str:
    return str(gc.get_freeze_count())


def refuse(text: str) -> str:
    raise ConversionError(text)


def break_down(text: str) -> str:
    raise KeyError(text)


def leave(text: str) -> str:
    sys.exit(text)


def rude(text: str) -> str:
    raise RudeError


def from_itself(text: str) -> str:
    error = KeyError(text)
    raise error from error


def undecodable(text: str) -> str:
    raise ConversionError("\udcff" + text)


def undecodable_answer(text: str) -> str:
    return "\udcff" + text


def vanish(text: str) -> str:
    os._exit(int(text))


def hoard(text: str) -> str:
    return str(len(bytearray(int(text))))


def hoard_in_torch(text: str) -> str:
    raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {text} bytes")


def garble(text: str) -> str:
    os.write(int(next(iter(sorted(_sockets())))), text.encode())
    time.sleep(300)
    return text


def stage(text: str) -> str:
    """Hold a file for as long as it works, as a conversion holds the folder that it fills."""
    file = Path(text)
    try:
        file.touch()  # within the block: the signal that stops it may come as soon as the file is there
        while True:
            time.sleep(0.01)
    finally:
        file.unlink()


def _sockets() -> list[int]:
    links = ((int(name), Path("/proc/self/fd", name)) for name in os.listdir("/proc/self/fd"))
    return [number for number, link in links if number > 2 and link.is_socket()]
