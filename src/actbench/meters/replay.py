"""What a training run reserves, from the allocations of one step that a ledger wrote down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actbench.errors import OutOfMemoryError
from actbench.meters.caching import CachingAllocator, OutOfSegments
from actbench.meters.expandable import ExpandableAllocator
from actbench.meters.ledger import Event
from actbench.units import format_bytes


def reserved_bytes(
    parts: Iterable[Sequence[Event]], *, limit_bytes: int, device: str, peak_bytes: int, expandable: bool
) -> int:
    """Return the most bytes that torch's allocator reserves.

    Args:
        parts: What was allocated and freed, in the order of a run; a part may come several times.
        limit_bytes: Memory that the run may use.
        device: Its name, for the message.
        peak_bytes: The most that was allocated at a time.
        expandable: Whether segments grow by pages.

    Raises:
        OutOfMemoryError: An allocation fails although there are as many free bytes, in pieces that are too small.
    """
    allocator = ExpandableAllocator(limit_bytes) if expandable else CachingAllocator(limit_bytes)
    held: set[int] = set()
    try:
        for part in parts:
            for event in part:
                _follow(allocator, held, event)
    except OutOfSegments:
        raise OutOfMemoryError(
            f"the step needs {format_bytes(peak_bytes)} on {device}, which may use {format_bytes(limit_bytes)}, but in "
            "pieces that its allocator does not find there; take a smaller --batch-size or another --scheme",
            peak_bytes,
        ) from None
    return allocator.peak_reserved_bytes


def _follow(allocator: CachingAllocator, held: set[int], event: Event) -> None:
    name, amount = event
    if name in held:
        allocator.free(name)
        held.remove(name)
    if amount:
        allocator.allocate(name, amount)
        held.add(name)
