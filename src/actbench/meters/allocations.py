"""Every allocation that torch's CPU allocator makes while some code runs, in-operator temporaries included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

_MARK = "actbench.mark."


class AllocationTrace:
    """Records the allocations and frees of torch's CPU allocator between entering and leaving, by torch's profiler.

    Bytes are those asked for, relative to what was alive on entering. Not seen are frees of what was alive before, and
    allocations in threads that torch's operators start for themselves.
    """

    def __init__(self) -> None:
        # The profiler's own log lines would stand between ours on stderr; it reads this when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self._marks: dict[str, int] = {}
        self._curve: list[int] = []

    def __enter__(self) -> AllocationTrace:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._draw_curve()

    def mark(self, name: str) -> None:
        """Give this moment a name, once."""
        with torch.profiler.record_function(_MARK + name):
            pass

    def live_bytes(self, mark: str) -> int:
        """Return the bytes alive at a mark; known after leaving."""
        return self._curve[self._marks[mark]]

    def peak_bytes(self, first: str, last: str) -> int:
        """Return the largest number of bytes alive from one mark to another; known after leaving."""
        return max(self._curve[self._marks[first] : self._marks[last] + 1])

    def _draw_curve(self) -> None:
        """Add up the events in the order of their times; ``_curve[i]`` is what is alive after the i-th.

        A free counts only if its allocation was seen. The profiler reports others too: it remembers the address of
        whatever outlived an earlier trace, and takes the free of a later tensor at that address for its free.
        """
        alive: dict[int, int] = {}
        live = 0
        self._curve.append(live)
        for event in sorted(self._events(), key=lambda event: event.start_time_ns):
            if event.name == "[memory]":
                change = event.extra_fields
                if change.alloc_size > 0:
                    alive[change.ptr] = change.alloc_size
                    live += change.alloc_size
                else:
                    live -= alive.pop(change.ptr, 0)
                self._curve.append(live)
            elif event.name.startswith(_MARK):
                self._marks[event.name.removeprefix(_MARK)] = len(self._curve) - 1

    def _events(self) -> Iterator[Any]:
        """Yield the profiler's events, outer ones before what they hold."""
        assert self._profile.kineto_results is not None
        waiting: list[Any] = list(reversed(self._profile.kineto_results.experimental_event_tree()))
        while waiting:
            event = waiting.pop()
            waiting += reversed(event.children)
            yield event
