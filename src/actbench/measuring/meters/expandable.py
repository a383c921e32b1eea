"""What torch's caching allocator reserves where its segments may grow.

The rules of ``expandable_segments:True`` are those of ``c10/cuda/CUDACachingAllocator.cpp`` on one stream. A pool has
one segment: a range of addresses an eighth longer than the device's memory (another one when it is full). Memory is
mapped behind it in pages, of 2 MiB for requests of up to 1 MiB, of 20 MiB for others, at the lowest address where a
request finds room. When the device is full, the pages that no block touches are unmapped, to be mapped elsewhere. A
page that is used in part stays, and so gaps add up here as well.
"""

from __future__ import annotations

import bisect

from actbench.measuring.meters.caching import SMALLEST_BLOCK, Block, CachingAllocator
from actbench.units import MIB

_PAGES = {True: 2 * MIB, False: 20 * MIB}  # of the pool of small requests, and of the other


class ExpandableAllocator(CachingAllocator):
    """Follows allocations by name, in segments that grow; ``reserved_bytes`` is the sum of all mapped pages."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._segment_bytes = limit_bytes * 9 // 8
        self._end = 1  # of the addresses of all segments
        self._unmapped: dict[bool, list[tuple[int, Block]]] = {True: [], False: []}

    def _smallest_rest(self, small: bool) -> int:
        return SMALLEST_BLOCK

    def _best_fit(self, small: bool, size: int) -> Block | None:
        """Take a free block that is large enough; one that could grow counts with what it could grow to."""
        free = self._free[small]
        index = bisect.bisect_left(free, (size, -1))
        if index == len(free):
            return None
        while index + 1 < len(free) and _reach(free[index + 1][2]) < _reach(free[index][2]):
            index += 1
        return self._taken(free[index][2])

    def _more(self, small: bool, size: int) -> Block | None:
        block = self._room(small, size)
        if not block.is_mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            missing = block.after  # what is mapped joins the free block before it
            if missing is None or not self._map(missing, min(size - block.size, missing.size)):
                return None
            block = missing
        return self._taken(block)

    def _room(self, small: bool, size: int) -> Block:
        """Return where the lowest run of unmapped and free blocks begins that a request fits in."""
        for _, unmapped in self._unmapped[small]:
            before = unmapped.before
            first = before if before is not None and before.is_free else unmapped
            if _is_run(first, size):
                return first
        length = _whole_pages(max(self._segment_bytes, size), _PAGES[small])
        segment = Block(length, _whole_pages(self._end, length), small, is_mapped=False)
        self._end = segment.end
        self._put_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes and join them with free neighbours."""
        amount = _whole_pages(size, _PAGES[block.small])
        if not self._reserve(amount):
            return False
        self._take_unmapped(block)
        if amount < block.size:
            self._put_unmapped(block.cut(amount))
        block.is_mapped = True
        self._join_and_put_back(block)
        return True

    def give_back(self) -> None:
        """Give the device the pages that no block touches."""
        for free in self._free.values():
            for _, _, block in list(free):
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages in a free block."""
        page = _PAGES[block.small]
        first, last = _whole_pages(block.address, page), block.end // page * page
        if first >= last:
            return
        self._taken(block)
        if block.address < first:
            whole = block.cut(first - block.address)
            self._put_back(block)
            block = whole
        if last < block.end:
            self._put_back(block.cut(last - block.address))
        self.reserved_bytes -= block.size
        block.is_mapped = False
        for other in (block.before, block.after):
            if other is not None and not other.is_mapped:
                self._take_unmapped(other)
                block.absorb(other)
        self._put_unmapped(block)

    def _put_unmapped(self, block: Block) -> None:
        bisect.insort(self._unmapped[block.small], (block.address, block))

    def _take_unmapped(self, block: Block) -> None:
        unmapped = self._unmapped[block.small]
        del unmapped[bisect.bisect_left(unmapped, (block.address,))]


def _whole_pages(size: int, page: int) -> int:
    return -(-size // page) * page


def _reach(block: Block) -> int:
    """Return how long a free block is with the unmapped one behind it."""
    after = block.after
    return block.size + (0 if after is None or after.is_mapped else after.size)


def _is_run(block: Block | None, size: int) -> bool:
    """Return whether no block of the next ``size`` bytes is allocated."""
    while size > 0 and block is not None and (block.is_free or not block.is_mapped):
        size -= block.size
        block = block.after
    return size <= 0
