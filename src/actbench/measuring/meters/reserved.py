"""What torch's caching allocator reserves for one step's allocations on one stream of a CUDA device or several.

A block serves requests of the stream it was cut for only. FSDP2 allocates on streams of its own: what it gathers into,
and what reduced gradients come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from actbench.measuring.meters.caching import CachingAllocator, ExpandableAllocator, OutOfSegments
from actbench.measuring.meters.peak import Event


def reserved_bytes(
    parts: Iterable[Sequence[Event]], *, limit_bytes: int, expandable: bool, streams: Mapping[int, str] | None = None
) -> int:
    """Return the most bytes that torch's allocator reserves in a run of ``parts``, which may repeat.

    More than ``limit_bytes`` where an allocation would fail, be it that as many bytes are free in pieces that are too
    small: the device then becomes as much larger as each such allocation takes.

    Segments may grow if ``expandable``. ``streams`` says which storages are allocated on which stream; all others are
    on the one that computes.
    """
    pools = _Pools(ExpandableAllocator if expandable else CachingAllocator, limit_bytes)
    of = streams or {}
    held: set[int] = set()
    for part in parts:
        for name, amount in part:
            stream = of.get(name, "")
            if name in held:
                pools.of(stream).free(name)
                held.remove(name)
            if amount:
                pools.allocate(stream, name, amount)
                held.add(name)
    return pools.peak_bytes


class _Pools:
    """The blocks of each stream, on one device."""

    def __init__(self, make: Callable[[int], CachingAllocator], limit_bytes: int) -> None:
        self._make, self._limit_bytes = make, limit_bytes
        self._of: dict[str, CachingAllocator] = {}
        self.peak_bytes = 0

    def of(self, stream: str) -> CachingAllocator:
        """Return what is cut for a stream."""
        if stream not in self._of:
            self._of[stream] = self._make(self._limit_bytes)
        return self._of[stream]

    def allocate(self, stream: str, name: int, amount: int) -> None:
        """Serve a request; where the device is full, all streams give back what is wholly free."""
        pool = self.of(stream)
        pool.limit_bytes = self._limit_bytes - self._reserved_bytes + pool.reserved_bytes
        try:
            pool.allocate(name, amount)
        except OutOfSegments:
            for other in self._of.values():
                if other is not pool:
                    other.give_back()
            pool.limit_bytes = self._limit_bytes - self._reserved_bytes + pool.reserved_bytes
            try:
                pool.allocate(name, amount)
            except OutOfSegments:
                pool.allocate_beyond(name, amount)
                self._limit_bytes = max(self._limit_bytes, self._reserved_bytes)
        self.peak_bytes = max(self.peak_bytes, self._reserved_bytes)

    @property
    def _reserved_bytes(self) -> int:
        return sum(each.reserved_bytes for each in self._of.values())
