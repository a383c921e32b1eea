"""What torch's caching allocator reserves for one step's allocations on one stream of a CUDA device or several.

A block serves requests of the stream it was cut for only. FSDP2 allocates on streams of its own: what it gathers into,
and what reduced gradients come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from actbench.measuring.meters.peak import Event
from actbench.simulator.caching import CachingAllocator, ExpandableAllocator, OutOfSegments


def reserved_bytes(
    parts: Iterable[Sequence[Event]], *, limit_bytes: int, expandable: bool, streams: Mapping[int, str] | None = None
) -> int:
    """Return the most bytes that torch's allocator reserves in a run of ``parts``, which may repeat.

    The result exceeds ``limit_bytes`` if an allocation would fail, even if enough bytes are free in pieces that are too
    small: the device then counts as larger by each such allocation.

    Segments may grow if ``expandable``. ``streams`` says which storages are allocated on which stream; all others are
    on the one that computes.
    """
    pools = Pools(limit_bytes, expandable=expandable, streams=streams)
    for part in parts:
        pools.play(part)
    return pools.peak_bytes


class Pools:
    """The blocks of each stream, on one device of ``limit_bytes``; arguments as for :func:`reserved_bytes`.

    With ``refuses`` an allocation that would fail is left out, and the device does not become larger.

    Attributes:
        limit_bytes: The memory of the device; it may be changed between two allocations.
        reserved_bytes: The bytes that are reserved now.
        peak_bytes: Most bytes that were reserved so far.
        is_exceeded: Whether an allocation would have failed.
    """

    def __init__(
        self, limit_bytes: int, *, expandable: bool, streams: Mapping[int, str] | None = None, refuses: bool = False
    ) -> None:
        self._refuses = refuses
        self._make: Callable[[int], CachingAllocator] = ExpandableAllocator if expandable else CachingAllocator
        self.limit_bytes = limit_bytes
        self._of: dict[str, CachingAllocator] = {}
        self._streams = streams or {}
        self._held: set[int] = set()
        self.reserved_bytes = self.peak_bytes = 0
        self.is_exceeded = False

    def play(self, events: Iterable[Event]) -> None:
        """Let storages be allocated and freed."""
        held, streams = self._held, self._streams
        for name, amount in events:
            stream = streams.get(name, "")
            if name in held:
                self._of[stream].free(name)
                held.remove(name)
            if amount and self.allocate(stream, name, amount):
                held.add(name)

    def give_back(self) -> None:
        """Return fully free segments to the driver."""
        for each in self._of.values():
            each.give_back()
        self.reserved_bytes = sum(each.reserved_bytes for each in self._of.values())

    def allocate(self, stream: str, name: int, amount: int) -> bool:
        """Return whether a request is served; where the device is full, all streams return their free segments."""
        pool = self._of.get(stream)
        if pool is None:
            pool = self._of[stream] = self._make(self.limit_bytes)
        # all streams share the memory of one device: a pool may grow by what the others leave
        of_others = self.reserved_bytes - pool.reserved_bytes
        pool.limit_bytes = self.limit_bytes - of_others
        try:
            pool.allocate(name, amount)
        except OutOfSegments:
            self.give_back()  # release_cached_blocks of CUDACachingAllocator gives back those of all streams
            of_others = self.reserved_bytes - pool.reserved_bytes
            pool.limit_bytes = self.limit_bytes - of_others
            try:
                pool.allocate(name, amount)
            except OutOfSegments:
                self.is_exceeded = True
                if self._refuses:
                    return False
                pool.allocate_beyond(name, amount)
                self.limit_bytes = max(self.limit_bytes, of_others + pool.reserved_bytes)
        self.reserved_bytes = of_others + pool.reserved_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        return True
