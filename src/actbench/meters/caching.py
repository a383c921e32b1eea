"""What torch's caching allocator reserves on a CUDA device for a given sequence of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` on one stream, with its default settings: requests above
1 MiB are cut from segments of their own, the smallest free block that is large enough serves a request, what is left of
it stays free beside it, and neighbours that are free are joined again. When the device is full, segments that are free
as a whole are given back. Memory can thus run out while enough of it is free, in pieces that are all too small.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from actbench.units import MIB

_SMALLEST_BLOCK = 512
_SMALL = MIB  # requests up to this share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # requests from this on have segments of their size, in steps of 2 MiB
_SEGMENT_STEP = 2 * MIB
_FAR = 1 << 48  # between the addresses of segments, which never touch


class OutOfSegments(Exception):  # noqa: N818  (an outcome, and no error of a user's)
    """No segment can be added for a request, and no free block serves it."""


@dataclass(eq=False)
class _Block:
    size: int
    address: int
    small: bool
    is_free: bool = False
    before: _Block | None = field(default=None, repr=False)
    after: _Block | None = field(default=None, repr=False)


class CachingAllocator:
    """Follows allocations by name.

    Args:
        limit_bytes: Memory of the device.

    Attributes:
        reserved_bytes: Sum of all segments.
        peak_reserved_bytes: The largest that was.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._limit_bytes = limit_bytes
        self._segments = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, name: int, size: int) -> None:
        """Serve a request for some bytes.

        Raises:
            OutOfSegments: It cannot be served.
        """
        size = max(_SMALLEST_BLOCK, -(-size // _SMALLEST_BLOCK) * _SMALLEST_BLOCK)
        small = size <= _SMALL
        block = self._best_fit(small, size) or self._new_segment(small, size)
        left = block.size - size
        if left >= (_SMALLEST_BLOCK if small else _SMALL + 1):
            rest = _Block(left, block.address + size, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put_back(rest)
        self._blocks[name] = block

    def free(self, name: int) -> None:
        """Take back what a name was given."""
        block = self._blocks.pop(name)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                block = _joined(block, other)
        self._put_back(block)

    def _best_fit(self, small: bool, size: int) -> _Block | None:
        free = self._free[small]
        index = bisect.bisect_left(free, (size, -1))
        if index == len(free):
            return None
        block = free.pop(index)[2]
        block.is_free = False
        return block

    def _new_segment(self, small: bool, size: int) -> _Block:
        amount = _segment_bytes(size)
        if self.reserved_bytes + amount > self._limit_bytes:
            self._give_back()
        if self.reserved_bytes + amount > self._limit_bytes:
            raise OutOfSegments
        self._segments += 1
        self.reserved_bytes += amount
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return _Block(amount, self._segments * _FAR, small)

    def _give_back(self) -> None:
        for small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            self._free[small] = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]

    def _put_back(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


def _joined(block: _Block, other: _Block) -> _Block:
    first, second = (other, block) if other is block.before else (block, other)
    joined = _Block(first.size + second.size, first.address, first.small, before=first.before, after=second.after)
    if joined.before is not None:
        joined.before.after = joined
    if joined.after is not None:
        joined.after.before = joined
    return joined
