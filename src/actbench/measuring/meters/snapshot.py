"""The events of a step in the format of ``torch.cuda.memory._snapshot``, which torch's memory visualiser shows.

The visualiser (pytorch.org/memory_viz) reads pickles of protocol 2 to 4 that hold only dicts, lists, tuples, texts,
numbers, flags and None. It draws the allocations of ``device_traces`` over their events and, from ``segments``, what is
alive at the end. Frames are lines of its texts, ``filename:line:name``: here a module and the operator that allocates,
and the kind. It colours entries by category, if they have one; one category must then be ``unknown``.
"""

from __future__ import annotations

import bisect
import pickle
from typing import Any

from actbench.measuring.meters.stepevents import Origin, StepEvents
from actbench.model.ledger import display_path
from actbench.model.timeline import TITLES

_START = 0x7F00_0000_0000
_PROTOCOL = 4  # the newest that the visualiser reads; Python's default may be newer
_STREAM = _DEVICE = 0
_MODEL = display_path("")


def pickled(snapshot: dict[str, Any]) -> bytes:
    """Return a snapshot in the format of the visualiser."""
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


def snapshot_of(step: StepEvents) -> dict[str, Any]:
    """Return a snapshot: first allocations of what is alive before a step, then the events of the step.

    Addresses are invented: each storage is in the first gap of one segment that is large enough.
    """
    arena, trace = _Arena(), [_entry("snapshot", _START, 0, [], "unknown")]
    placed: dict[int, tuple[int, int]] = {}
    made: dict[tuple[str, Origin], list[dict[str, Any]]] = {}

    def frames_of(name: int) -> list[dict[str, Any]]:
        """Return one list for equal storages, so that a pickle holds it once."""
        kind, origin = TITLES[step.kind_of(name)], step.origin_of(name)
        return made.setdefault((kind, origin), [_frame(origin.module or _MODEL, origin.operator), _frame("kind", kind)])

    for name, amount in step.events:
        frames, kind = frames_of(name), TITLES[step.kind_of(name)]
        if name in placed:
            address, size = placed.pop(name)
            arena.free(address, size)
            trace += (_entry(action, address, size, frames, kind) for action in ("free_requested", "free_completed"))
        if amount:
            placed[name] = arena.allocate(amount), amount
            trace.append(_entry("alloc", placed[name][0], amount, frames, kind))
    trace.insert(1, _entry("segment_alloc", _START, arena.size, [], "unknown"))
    blocks = [(address, size, frames_of(name)) for name, (address, size) in placed.items()]
    return {"segments": [_segment(arena.size, sorted(blocks, key=lambda block: block[0]))], "device_traces": [trace]}


class _Arena:
    """Gives out addresses in one segment that grows."""

    def __init__(self) -> None:
        self.size = 0
        self._gaps: list[tuple[int, int]] = []  # address and size, in order; no two touch

    def allocate(self, size: int) -> int:
        """Return the address of the first gap that is large enough, or else of the segment's end."""
        for place, (address, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[place : place + 1] = [(address + size, room - size)] if room > size else []
                return address
        self.size += size
        return _START + self.size - size

    def free(self, address: int, size: int) -> None:
        """Take a range back, and join it with the gaps that it touches."""
        place = bisect.bisect_left(self._gaps, (address, 0))
        if place < len(self._gaps) and self._gaps[place][0] == address + size:
            size += self._gaps.pop(place)[1]
        if place and sum(self._gaps[place - 1]) == address:
            address, before = self._gaps.pop(place - 1)
            place, size = place - 1, size + before
        self._gaps.insert(place, (address, size))


def _frame(filename: str, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": 0, "name": name}


def _entry(action: str, address: int, size: int, frames: list[dict[str, Any]], category: str) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": _STREAM,
        "frames": frames,
        "category": category,
    }


def _segment(total: int, blocks: list[tuple[int, int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return a segment of blocks, with gaps between them and at its end."""
    found, end, allocated = [], _START, sum(size for _, size, _ in blocks)
    for address, size, frames in (*blocks, (_START + total, 0, [])):
        if address > end:
            found.append(_block(end, address - end, "inactive", []))
        if size:
            found.append(_block(address, size, "active_allocated", frames))
        end = address + size
    return {
        "device": _DEVICE,
        "address": _START,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": _STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": found,
    }


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
