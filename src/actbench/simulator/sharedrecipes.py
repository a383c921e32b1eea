"""Recipes that processes share: each begins with what the operators did in those before it.

Two thirds of a simulated step go to torch's fake tensor mode, for operators that other cases of a ``fit`` had run. Only
data goes from process to process: a mode that outlived its case made later ones crash.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import struct
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch

from actbench.simulator.recalled import Known

_LENGTH = struct.Struct("!Q")
_MOST_BYTES = 64 * 2**20


class SharedRecipes:
    """Recipes in a file that a process and those that are forked from it later have in common.

    Its first bytes are the length of what is whole: a process that is killed while it writes leaves that as it was.

    Args:
        file: A descriptor of an empty file. It holds pickles, so nothing else may write to it: it has no name.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._of: Hashable = None
        self._taken = 0

    def take(self, of: Hashable) -> Known:
        """Return recipes of all processes, for :func:`~actbench.simulator.recalled.beginning_with`.

        Args:
            of: What the processes have in common that share them, such as the device that they simulate.
        """
        self._of = of
        with self._locked(fcntl.LOCK_SH) as length:
            parts = io.BytesIO(os.pread(self._file, length, _LENGTH.size))
        known: Known = {}
        operators: dict[str, Any] = {}
        while parts.tell() < length:
            whose, added = pickle.load(parts)
            for name, rest, make in added if whose == of else ():
                operator = operators[name] = operators.get(name) or _operator(name)
                if operator is not None:
                    known[operator, *rest] = make
        self._taken = len(known)
        return known

    def give(self, known: Known) -> None:
        """Give other processes what was added to the recipes that were taken."""
        found = islice(known.items(), self._taken, None)
        # without space, or with something among arguments that no other process can have, others look for themselves
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            added = [(str(operator), rest, make) for (operator, *rest), make in found]
            part = pickle.dumps((self._of, added))
            with self._locked(fcntl.LOCK_EX) as length:
                if length + len(part) <= _MOST_BYTES:
                    os.pwrite(self._file, part, _LENGTH.size + length)
                    os.pwrite(self._file, _LENGTH.pack(length + len(part)), 0)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[int]:
        """Lock the file, and yield the bytes of its recipes."""
        fcntl.lockf(self._file, kind)
        try:
            written = os.pread(self._file, _LENGTH.size, 0)
            yield _LENGTH.unpack(written)[0] if written else 0
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _operator(name: str) -> Any:
    """Return an operator by its full name, such as ``aten.add.Tensor``; None if this process has not registered it."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
