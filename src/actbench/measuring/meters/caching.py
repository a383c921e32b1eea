"""What torch's caching allocator reserves on a CUDA device for a sequence of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` on one stream, with default settings: requests above 1 MiB
are cut from segments of their own, the smallest free block that is large enough serves a request, its rest stays free,
and free neighbours are joined. When the device is full, wholly free segments are given back. Memory can thus run out
while enough of it is free, in pieces that are too small. Growing segments are in
:mod:`actbench.measuring.meters.expandable`.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from actbench.units import MIB

SMALLEST_BLOCK = 512
_SMALL = MIB  # requests up to this share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # requests from this on have segments of their size, in steps of 2 MiB
_SEGMENT_STEP = 2 * MIB
_FAR = 1 << 48  # between the addresses of segments, which never touch


class OutOfSegments(Exception):  # noqa: N818  (an outcome, and no error of a user's)
    """No segment can be added for a request, and no free block serves it."""


@dataclass(eq=False)
class Block:
    """A piece of a segment.

    Attributes:
        address: Where it begins; addresses order the blocks of a pool.
        small: Of which of the two pools it is.
        is_free: Whether it can serve a request.
        is_mapped: Whether memory lies behind it; in segments that do not grow it always does.
        before: Its neighbour in the segment at lower addresses; ``after`` is the other one.
    """

    size: int
    address: int
    small: bool
    is_free: bool = False
    is_mapped: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return the rest as the block behind."""
        rest = Block(
            self.size - size, self.address + size, self.small, is_mapped=self.is_mapped, before=self, after=self.after
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, neighbour: Block) -> None:
        """Become one block with a neighbour."""
        if neighbour is self.before:
            self.address, self.before = neighbour.address, neighbour.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self
        self.size += neighbour.size


class CachingAllocator:
    """Follows allocations by name, on a device of ``limit_bytes``; ``reserved_bytes`` is the sum of all segments.

    ``limit_bytes`` may be changed between two of them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.limit_bytes: float = limit_bytes
        self._segments = 0
        self._blocks: dict[int, Block] = {}
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, name: int, size: int) -> None:
        """Serve a request; OutOfSegments if it cannot be served."""
        size = max(SMALLEST_BLOCK, -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK)
        small = size <= _SMALL
        block = self._best_fit(small, size) or self._more(small, size)
        if block is None:
            self.give_back()
            block = self._more(small, size)
        if block is None:
            raise OutOfSegments
        if block.size - size >= self._smallest_rest(small):
            self._put_back(block.cut(size))
        self._blocks[name] = block

    def allocate_beyond(self, name: int, size: int) -> None:
        """Serve a request that found no room, on a device that is as much larger as that takes."""
        self.limit_bytes = math.inf
        self.allocate(name, size)
        self.limit_bytes = self.reserved_bytes

    def free(self, name: int) -> None:
        """Take back what a name was given."""
        self._join_and_put_back(self._blocks.pop(name))

    def _smallest_rest(self, small: bool) -> int:
        """Return the bytes from which on the rest of a block is cut off."""
        return SMALLEST_BLOCK if small else _SMALL + 1

    def _best_fit(self, small: bool, size: int) -> Block | None:
        """Take a free block that is large enough."""
        free = self._free[small]
        index = bisect.bisect_left(free, (size, -1))
        return None if index == len(free) else self._taken(free[index][2])

    def _more(self, small: bool, size: int) -> Block | None:
        """Return a block of memory from the device, None when there is too little."""
        amount = _segment_bytes(size)
        if not self._reserve(amount):
            return None
        self._segments += 1
        return Block(amount, self._segments * _FAR, small)

    def give_back(self) -> None:
        """Give the device what is wholly free."""
        for small, free in self._free.items():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            self._free[small] = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]

    def _reserve(self, amount: int) -> bool:
        if self.reserved_bytes + amount > self.limit_bytes:
            return False
        self.reserved_bytes += amount
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _join_and_put_back(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                block.absorb(self._taken(other))
        self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _taken(self, block: Block) -> Block:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        block.is_free = False
        return block


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP
