"""Segments that grow: each rule by hand, and all of them against a model that knows nothing but bytes and pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from actbench.simulator.caching import CachingAllocator, ExpandableAllocator, OutOfSegments
from actbench.simulator.reserved import reserved_bytes
from actbench.units import GIB, KIB, MIB

PAGES = {True: 2 * MIB, False: 20 * MIB}
LIMIT = 200 * MIB

Event = tuple[int, int]


def holes(size: int, count: int, then: int, times: int) -> list[Event]:
    """Return events that allocate blocks, free every second one and ask for larger ones."""
    blocks = [(name, size) for name in range(count)]
    freed = [(name, 0) for name in range(0, count, 2)]
    return [*blocks, *freed, *((count + name, then) for name in range(times))]


def live_peak(events: list[Event]) -> int:
    held: dict[int, int] = {}
    peaks = []
    for name, amount in events:
        held[name] = amount
        peaks.append(sum(held.values()))
    return max(peaks)


def reserved(events: list[Event], limit: int, *, expandable: bool) -> int:
    return reserved_bytes([events], limit_bytes=limit, expandable=expandable)


def test_pages_that_are_used_in_part_serve_no_larger_request() -> None:
    events = holes(5 * MIB, 1600, 15 * MIB, 266)
    limit = 14 * GIB

    grown, ordinary = (reserved(events, limit, expandable=expandable) for expandable in (True, False))

    assert live_peak(events) == 1600 * 5 * MIB
    assert ordinary == (1600 * 5 + 266 * 16) * MIB
    assert grown == (1600 * 5 + 4000) * MIB  # 266 * 15 = 3990 in pages of 20, and not one byte of the old pages


@pytest.mark.parametrize("expandable", [True, False])
def test_memory_that_half_used_pages_hold_is_more_than_the_card_has(expandable: bool) -> None:
    events, limit = holes(5 * MIB, 1600, 15 * MIB, 266), 10 * GIB

    assert live_peak(events) < limit < reserved(events, limit, expandable=expandable)


@pytest.mark.parametrize("expandable", [True, False])
def test_a_request_larger_than_the_card_is_served_by_a_larger_card(expandable: bool) -> None:
    events = [(0, 60 * MIB), (1, GIB), (0, 0), (2, 40 * MIB), (3, 4 * GIB), (1, 0), (4, GIB)]

    # in pages: 40 of the 60 are still touched when the last segment is added; else the 60 are one segment
    expected = 40 + 1040 + 4100 if expandable else 60 + 1024 + 4096
    assert reserved(events, LIMIT, expandable=expandable) == expected * MIB


def test_pages_that_are_free_as_a_whole_serve_any_request_elsewhere() -> None:
    events = holes(40 * MIB, 20, 200 * MIB, 2)  # 400 of 800 MiB are free, in pieces of two pages

    assert reserved(events, 800 * MIB, expandable=True) == 800 * MIB
    assert reserved(events, 799 * MIB, expandable=True) > 799 * MIB


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(MIB + 1, 64 * MIB), min_size=1, max_size=12))
def test_without_gaps_it_is_the_peak_in_whole_pages(sizes: list[int]) -> None:
    events = [*enumerate(sizes), *((name, 0) for name in range(len(sizes)))]
    total = sum(-(-size // 512) * 512 for size in sizes)

    assert reserved(events, 4 * GIB, expandable=True) == -(-total // PAGES[False]) * PAGES[False]


def test_small_requests_have_pages_of_their_own() -> None:
    allocator = ExpandableAllocator(GIB)

    allocator.allocate(0, MIB)
    allocator.allocate(1, MIB + 1)

    assert allocator.reserved_bytes == 22 * MIB


def test_what_a_request_leaves_of_a_page_begins_the_next_block() -> None:
    allocators = (ExpandableAllocator(GIB), CachingAllocator(GIB))
    for allocator in allocators:
        allocator.allocate(0, 19 * MIB + 512 * KIB)
        allocator.allocate(1, 20 * MIB + 512 * KIB)

    assert [allocator.reserved_bytes // MIB for allocator in allocators] == [40, 20 + 22]


def test_a_free_block_that_can_grow_is_the_last_choice() -> None:
    allocator = ExpandableAllocator(GIB)
    for name, size in enumerate((30, 5, 23)):
        allocator.allocate(name, size * MIB)  # 58 of 60 MiB
    allocator.free(0)
    allocator.free(2)  # free are 30 in front, and 25 at the end of what is mapped

    allocator.allocate(3, 25 * MIB)  # fits the end, but goes to the front
    allocator.allocate(4, 40 * MIB)  # of which 25 are there

    assert allocator.reserved_bytes == 80 * MIB


def test_a_segment_without_room_is_followed_by_another() -> None:
    """Addresses are an eighth more than memory: a large request behind a block in the middle finds none."""
    allocator = ExpandableAllocator(LIMIT)
    allocator.allocate(0, 100 * MIB)
    allocator.allocate(1, 20 * MIB)
    allocator.free(0)

    allocator.allocate(2, 140 * MIB)  # 100 in front, 120 behind

    assert allocator.reserved_bytes == 160 * MIB


# The model: per segment which bytes are allocated and which pages are mapped; blocks are read off these.


@dataclass
class Segment:
    length: int
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    mapped: set[int] = field(default_factory=set)


@dataclass
class Model:
    """The same rules, with every block found anew from bytes and pages at every step."""

    limit: int
    pools: dict[bool, list[Segment]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def reserved(self) -> int:
        return sum(PAGES[small] * len(segment.mapped) for small, pool in self.pools.items() for segment in pool)

    def pieces(self, small: bool, segment: Segment) -> list[tuple[int, int, str]]:
        """Return begin, end and kind of what a segment consists of, neighbours of one kind as one."""
        page = PAGES[small]
        edges = {place for span in segment.live.values() for place in span} | set(range(0, segment.length + 1, page))
        cuts = sorted(edges)
        kinds = []
        for begin, end in itertools.pairwise(cuts):
            taken = any(first <= begin < last for first, last in segment.live.values())
            kinds.append((begin, end, "live" if taken else "free" if begin // page in segment.mapped else "unmapped"))
        groups = (list(group) for _, group in itertools.groupby(kinds, key=lambda piece: piece[2]))
        return [(group[0][0], group[-1][1], group[0][2]) for group in groups]

    def allocate(self, name: int, size: int) -> bool:
        size = -(-size // 512) * 512
        small = size <= MIB
        for attempt in ("cached", "grown", "after unmapping"):
            if attempt == "grown":
                self.grow(small, size)
            if attempt == "after unmapping":
                self.unmap()
                self.grow(small, size)
            place = self.grown if attempt != "cached" else self.best(small, size)
            if place is not None:
                segment, begin = place
                segment.live[name] = (begin, begin + size)
                return True
        return False

    def best(self, small: bool, size: int) -> tuple[Segment, int] | None:
        found = []
        for number, segment in enumerate(self.pools[small]):
            pieces = [*self.pieces(small, segment), (0, 0, "end")]
            for (begin, end, kind), (first, last, following) in itertools.pairwise(pieces):
                if kind == "free" and end - begin >= size:
                    reach = end - begin + (last - first if following == "unmapped" else 0)
                    found.append((end - begin, number, begin, reach))
        found.sort()
        while len(found) > 1 and found[1][3] < found[0][3]:
            del found[0]
        return (self.pools[small][found[0][1]], found[0][2]) if found else None

    def grow(self, small: bool, size: int) -> None:
        """Map pages for a request and set ``grown`` to its place, or to None."""
        page = PAGES[small]
        segment, begin = self.room(small, size)
        self.grown = None
        for first, last, kind in self.pieces(small, segment):
            begins, ends = max(first, begin), min(last, begin + size)
            if kind == "unmapped" and begins < ends:
                wanted = range(begins // page, -(-ends // page))
                if self.reserved + page * len(wanted) > self.limit:
                    return
                segment.mapped.update(wanted)
        self.grown = segment, begin

    def room(self, small: bool, size: int) -> tuple[Segment, int]:
        for segment in self.pools[small]:
            pieces = self.pieces(small, segment)
            for index, (begin, _, kind) in enumerate(pieces):
                start = index - 1 if index and pieces[index - 1][2] == "free" else index
                run = itertools.takewhile(lambda piece: piece[2] != "live", pieces[start:])
                if kind == "unmapped" and sum(last - first for first, last, _ in run) >= size:
                    return segment, pieces[start][0] if start < index else begin
        page = PAGES[small]
        self.pools[small].append(Segment(-(-(self.limit * 9 // 8) // page) * page))
        return self.pools[small][-1], 0

    def unmap(self) -> None:
        for small, pool in self.pools.items():
            for segment in pool:
                touched = {
                    number
                    for begin, end in segment.live.values()
                    for number in range(begin // PAGES[small], -(-end // PAGES[small]))
                }
                segment.mapped &= touched

    def free(self, name: int) -> None:
        for segment in (*self.pools[True], *self.pools[False]):
            segment.live.pop(name, None)


SIZES = st.one_of(
    st.integers(1, 1100).map(lambda n: n * KIB),
    st.integers(2, 50).map(lambda n: n * MIB),
    st.integers(20, 150).map(lambda n: n * MIB),
)
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 30)), min_size=20, max_size=60)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_reserved_bytes_are_those_of_bytes_and_pages(steps: list[tuple[bool, int, int]]) -> None:
    allocator, model = ExpandableAllocator(LIMIT), Model(LIMIT)
    live: dict[int, int] = {}

    for name, (frees, size, which) in enumerate(steps):
        if frees and live:
            gone = sorted(live)[which % len(live)]
            allocator.free(gone)
            model.free(gone)
            del live[gone]
        else:
            if served(allocator, name, size):
                live[name] = size
            assert model.allocate(name, size) == (name in live)
        assert allocator.reserved_bytes == model.reserved
        assert sum(live.values()) <= allocator.reserved_bytes <= allocator.peak_reserved_bytes <= LIMIT
        assert places(allocator) == places_of(model)


def served(allocator: ExpandableAllocator, name: int, size: int) -> bool:
    try:
        allocator.allocate(name, size)
    except OutOfSegments:
        return False
    return True


def places(allocator: ExpandableAllocator) -> dict[int, tuple[int, int]]:
    """Return the place of every allocated block within its segment, after a look at all neighbours."""
    for block in allocator._blocks.values():
        assert block.is_mapped
        assert block.after is None or block.after.address == block.end
    for block in (block for unmapped in allocator._unmapped.values() for _, block in unmapped):
        assert block.after is None or block.after.is_mapped
    return {
        name: (block.address % segment_length(block.small), block.size) for name, block in allocator._blocks.items()
    }


def places_of(model: Model) -> dict[int, tuple[int, int]]:
    return {
        name: (begin, end - begin)
        for pool in model.pools.values()
        for segment in pool
        for name, (begin, end) in segment.live.items()
    }


def segment_length(small: bool) -> int:
    return -(-(LIMIT * 9 // 8) // PAGES[small]) * PAGES[small]
