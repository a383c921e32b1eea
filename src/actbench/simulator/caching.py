"""The bytes that torch's caching allocator reserves on a CUDA device for a sequence of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` on one stream, with default settings. Requests above 1 MiB
are cut from other segments than smaller ones. The smallest free block that is large enough serves a request, and its
rest stays free. Free neighbours are joined. When the device is full, fully free segments are returned to it. Memory can
thus run out while enough of it is free, in pieces that are too small.

With ``expandable_segments:True`` segments grow. A pool has one: a range of addresses an eighth longer than the device's
memory (another one when it is full). Memory is mapped to it in pages, of 2 MiB for requests of up to 1 MiB, of 20 MiB
for others, at the lowest address where a request finds room. When the device is full, pages that no block touches are
unmapped, to be mapped elsewhere. A page that is used in part stays, so gaps add up here too.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from actbench.units import MIB

# kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge of c10/core/AllocatorConfig.h
SMALLEST_BLOCK = 512
_SMALL = MIB  # requests up to this share segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # requests of at least this have segments of their size, in steps of 2 MiB
_SEGMENT_STEP = 2 * MIB
_FAR = 1 << 48  # distance between the addresses of segments, which never touch
# as in find_expandable_block: kSmallBuffer for the pool of small requests, kLargeBuffer for the other one
_PAGES = {True: 2 * MIB, False: 20 * MIB}  # page sizes of the pool of small requests, and of the other pool


def round_up(amount: int, block: int) -> int:
    """Return the smallest multiple of ``block`` that is at least ``amount``."""
    return -(-amount // block) * block


class OutOfSegments(Exception):  # noqa: N818  (an outcome, not a user's error)
    """No free block serves a request, and no segment can be added for it."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        address: Where it begins; addresses order the blocks of a pool.
        small: Whether it is in the pool of small requests; the other pool is for large ones.
        is_free: Whether it can serve a request.
        is_mapped: Whether it has memory; always true in segments that do not grow.
        before: Its neighbour in the segment at lower addresses; ``after`` is the neighbour at higher ones.
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
        """The address after its last byte."""
        return self.address + self.size

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return the rest as the next block."""
        rest = Block(
            self.size - size, self.address + size, self.small, is_mapped=self.is_mapped, before=self, after=self.after
        )
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, neighbour: Block) -> None:
        """Join with a neighbour into one block."""
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
        """Serve a request, or raise OutOfSegments."""
        size = max(SMALLEST_BLOCK, round_up(size, SMALLEST_BLOCK))
        small = size <= _SMALL
        block = self._best_fit(small, size) or self._more(small, size)
        if block is None:
            # the order of DeviceCachingAllocator::malloc: free blocks are not asked again after memory is given back
            self.give_back()
            block = self._more(small, size)
        if block is None:
            raise OutOfSegments
        if block.size - size >= self._smallest_rest(small):
            self._put_back(block.cut(size))
        self._blocks[name] = block

    def allocate_beyond(self, name: int, size: int) -> None:
        """Serve a request that found no room, as on a device that is larger by what the request needs."""
        self.limit_bytes = math.inf
        self.allocate(name, size)
        self.limit_bytes = self.reserved_bytes

    def free(self, name: int) -> None:
        """Free the block of a name."""
        self._join_and_put_back(self._blocks.pop(name))

    def _smallest_rest(self, small: bool) -> int:
        """Return the least bytes at which the rest of a block is cut off."""
        # should_split of torch: the rest of a large block must be more than kSmallSize, not as much
        return SMALLEST_BLOCK if small else _SMALL + 1

    def _best_fit(self, small: bool, size: int) -> Block | None:
        """Take the smallest free block that is large enough, or return None."""
        free = self._free[small]
        # blocks of one size go by address, as in torch's BlockComparatorSize; -1 is below every address
        index = bisect.bisect_left(free, (size, -1))
        return None if index == len(free) else self._taken(free[index][2])

    def _more(self, small: bool, size: int) -> Block | None:
        """Return a block of new memory from the device, or None if there is too little."""
        amount = _segment_bytes(size)
        if not self._reserve(amount):
            return None
        self._segments += 1
        return Block(amount, self._segments * _FAR, small)

    def give_back(self) -> None:
        """Return fully free segments to the driver."""
        for small, free in self._free.items():
            # release_blocks of torch returns a segment only where no neighbour is left, so that it is one free block
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
        # no two blocks have one address, so that bisect never compares the blocks themselves
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
    return round_up(size, _SEGMENT_STEP)


class ExpandableAllocator(CachingAllocator):
    """Follows allocations by name, in segments that grow; ``reserved_bytes`` is the sum of all mapped pages."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        # torch's ExpandableSegment takes 9/8 of the card, not of the limit; the difference matters little (decision 12)
        self._segment_bytes = limit_bytes * 9 // 8
        self._end = 1  # first address after all segments
        self._unmapped: dict[bool, list[tuple[int, Block]]] = {True: [], False: []}

    def _smallest_rest(self, small: bool) -> int:
        # should_split of torch takes the rule of small blocks for both pools here: a rest joins what is mapped next
        return SMALLEST_BLOCK

    def _best_fit(self, small: bool, size: int) -> Block | None:
        """Take a free block that is large enough; a block that can grow counts with its largest size."""
        free = self._free[small]
        index = bisect.bisect_left(free, (size, -1))
        if index == len(free):
            return None
        # get_free_block of torch stops at the first block that cannot grow to less, so this is no minimum over all
        while index + 1 < len(free) and _reach(free[index + 1][2]) < _reach(free[index][2]):
            index += 1
        return self._taken(free[index][2])

    def _more(self, small: bool, size: int) -> Block | None:
        block = self._room(small, size)
        if not block.is_mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            missing = block.after  # newly mapped pages join the free block before them
            if missing is None or not self._map(missing, min(size - block.size, missing.size)):
                return None
            block = missing
        return self._taken(block)

    def _room(self, small: bool, size: int) -> Block:
        """Return the first block of the lowest run of unmapped and free blocks that a request fits in."""
        for _, unmapped in self._unmapped[small]:
            # as find_expandable_block of torch: a free block right before an unmapped one grows into it
            before = unmapped.before
            first = before if before is not None and before.is_free else unmapped
            if _is_run(first, size):
                return first
        length = round_up(max(self._segment_bytes, size), _PAGES[small])
        segment = Block(length, round_up(self._end, length), small, is_mapped=False)
        self._end = segment.end
        self._put_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Map the pages of the first ``size`` bytes and join them with free neighbours."""
        amount = round_up(size, _PAGES[block.small])
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
        # segmentRight and segmentLeft in torch's ExpandableSegment::unmap: a page in part stays mapped
        first, last = round_up(block.address, page), block.end // page * page
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
        # a tuple of the address alone sorts before the entry with that address
        del unmapped[bisect.bisect_left(unmapped, (block.address,))]


def _reach(block: Block) -> int:
    """Return the size of a free block together with the unmapped block after it."""
    after = block.after
    return block.size + (0 if after is None or after.is_mapped else after.size)


def _is_run(block: Block | None, size: int) -> bool:
    """Return whether no block in the next ``size`` bytes is allocated."""
    while size > 0 and block is not None and (block.is_free or not block.is_mapped):
        size -= block.size
        block = block.after
    return size <= 0
