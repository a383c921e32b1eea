"""An operator cache that processes share: each starts with the results of those before it.

Two thirds of a simulated step go to torch's fake tensor mode, for operators that other cases of a ``fit`` had run. Only
data goes from process to process: a mode that outlived its case made later ones crash.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch

from actbench.simulator.cachingmode import OpCache

_LENGTH = struct.Struct("!Q")
_PART = struct.Struct("!HI")
_MOST_BYTES = 8 * 2**20  # which take half a second to read; ResNet-50 with all that fit tries has half a MiB

_Result = tuple[str, tuple[Any, ...], Any]
"""The name of an operator, the rest of the key, and what makes the result again."""


class SharedOpCache:
    """Cached results in a file that a process shares with the processes that it forks.

    Its first bytes are the length of what is whole: a process that is killed while it writes, or has no space, leaves
    that as it was. Each part has the name of a device, and cached results as a pickle.

    Args:
        file: A descriptor of an empty file. It holds pickles, so nothing else may write to it: it has no name.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._read_bytes = 0
        self._known: dict[str, OpCache] = {}
        self._unresolved: dict[str, list[_Result]] = {}  # of operators that this process has not registered

    def refresh(self) -> None:
        """Read what other processes have added; what is forked from this process then need not read it again."""
        # cached results only save time
        with suppress(OSError):
            with self._locked(fcntl.LOCK_SH) as length:
                added = os.pread(self._file, length - self._read_bytes, _LENGTH.size + self._read_bytes)
            self._read_bytes += len(added)
            for device, part in _parts_of(added):
                self._resolve(device, pickle.loads(part))

    def load(self, device: str) -> CacheSnapshot:
        """Return the cached results of all processes that simulated a device; none where they cannot be read."""
        self.refresh()
        self._resolve(device, self._unresolved.pop(device, []))
        return CacheSnapshot(self, device, dict(self._known.get(device, {})))

    def _resolve(self, device: str, results: list[_Result]) -> None:
        """Note results whose operators are registered in this process, and leave the others for later."""
        known, operators = self._known.setdefault(device, {}), dict[str, Any]()
        for name, rest, make in results:
            operator = operators[name] = operators.get(name) or _operator(name)
            if operator is None:
                self._unresolved.setdefault(device, []).append((name, rest, make))
            else:
                known[operator, *rest] = make

    def add(self, device: str, found: OpCache) -> None:
        """Add results for later processes, as far as there is space."""
        # without space, or with something among arguments that no other process can have, others look for themselves
        with suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
            results = pickle.dumps([(str(operator), tuple(rest), make) for (operator, *rest), make in found.items()])
            part = _PART.pack(len(device.encode()), len(results)) + device.encode() + results
            with self._locked(fcntl.LOCK_EX) as length:
                # a full disk takes less than all, and says nothing
                if length + len(part) <= _MOST_BYTES and self._wrote(part, _LENGTH.size + length):
                    self._wrote(_LENGTH.pack(length + len(part)), 0)

    def _wrote(self, data: bytes, place: int) -> bool:
        return os.pwrite(self._file, data, place) == len(data)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[int]:
        """Lock the file, and yield the bytes of its parts."""
        # lockf locks for a process; flock would lock for the open file, which forked processes share
        fcntl.lockf(self._file, kind)
        try:
            written = os.pread(self._file, _LENGTH.size, 0)
            yield _LENGTH.unpack(written)[0] if written else 0
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class CacheSnapshot:
    """The cached results that a process starts with.

    Attributes:
        known: The results, for :func:`~actbench.simulator.cachingmode.starting_from`.
    """

    def __init__(self, shared: SharedOpCache, device: str, known: OpCache) -> None:
        self._shared, self._device = shared, device
        self._count = len(known)
        self.known = known

    def publish(self) -> None:
        """Add the results of this process to the shared cache."""
        self._shared.add(self._device, dict(islice(self.known.items(), self._count, None)))


def _parts_of(held: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the device and the pickle of each part."""
    place = 0
    while place < len(held):
        of_name, of_results = _PART.unpack_from(held, place)
        begins = place + _PART.size + of_name
        yield held[place + _PART.size : begins].decode(), held[begins : begins + of_results]
        place = begins + of_results


def _operator(name: str) -> Any:
    """Return an operator by its full name, such as ``aten.add.Tensor``; None if this process has not registered it."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
