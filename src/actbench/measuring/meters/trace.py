"""The allocations and frees that torch's allocator reports to torch's profiler."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function

from actbench.measuring.meters.peak import Event
from actbench.measuring.meters.stepevents import Origin
from actbench.model.ledger import OUTSIDE

_MARK = "actbench.mark."
_MODULE = "actbench.module."
_NODE = "autograd::engine::evaluate_function: "

UNSEEN, ON_HOST, STATE_ON_HOST = -1, -2, -3
"""Names of bytes without an event: all from before a trace of a CUDA device, in host memory, state in host memory."""

MadeNode = Callable[[int], str]
"""From the sequence number of a node of autograd's graph to the module that made it."""


class AllocationTrace:
    """Records the allocations and frees of one of torch's allocators inside the block, by torch's profiler.

    Bytes are those that the allocator counts, relative to those alive on entry: on the CPU requested bytes, on CUDA
    bytes of blocks. On the CPU, frees of older storages, and allocations in threads that operators start, are not
    seen; on CUDA, such a free shrinks :data:`UNSEEN`. There the profiler also misses frees in backward passes, which
    the sum that each event brings tells of.

    After leaving, ``events`` has the events, and ``origins`` the origin of each storage that they name.

    Args:
        device: The device of the allocator.
        made_node: Returns the module that made a node of autograd's graph; None if modules are unknown.
        after: A trace that has been left; this one goes on with its events. Nothing may be freed between them.
    """

    def __init__(
        self,
        device: Literal["cpu", "cuda"] = "cpu",
        made_node: MadeNode | None = None,
        after: AllocationTrace | None = None,
    ) -> None:
        # Silences the profiler's log lines on stderr; it reads this variable at its first start.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        self._device = device
        self._made_node = made_node
        self._marks: dict[str, int] = {}
        self._named: dict[str, dict[int, Event]] = {}
        self._curve: list[int] = after._curve if after else [0]
        self._unseen: int = after._unseen if after else 0
        self._before: int | None = None  # what the allocator counted when the first event began
        self._alive: dict[int, Event] = after._alive if after else {}
        self._new_names: Iterator[int] = after._new_names if after else itertools.count()
        self.events: list[Event] = after.events if after else []
        self.origins: dict[int, Origin] = after.origins if after else {}

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
        with record_function(_MARK + name):
            pass

    @staticmethod
    def around_module(path: str) -> Callable[[], object]:
        """Note that a module runs, until the returned function is called."""
        running: Any = record_function(_MODULE + path)
        running.__enter__()
        return lambda: running.__exit__(None, None, None)

    def live_bytes(self, mark: str) -> int:
        """Return the bytes alive at a mark; only after leaving."""
        return self._curve[self._marks[mark]]

    def events_until(self, mark: str) -> int:
        """Return the number of events before a mark; only after leaving."""
        return self._marks[mark]

    def peak_at(self, first: str, last: str) -> int:
        """Return the number of events before the peak between two marks; only after leaving."""
        return max(range(self._marks[first], self._marks[last] + 1), key=self._curve.__getitem__)

    def peak_bytes(self, first: str, last: str) -> int:
        """Return the peak between two marks; only after leaving."""
        return self._curve[self.peak_at(first, last)]

    def names(self, mark: str, addresses: Iterable[int]) -> set[int]:
        """Return the names in ``events`` of the storages at these addresses at a mark; only after leaving."""
        return {self._named[mark][address][0] for address in addresses if address in self._named[mark]}

    def named(self, mark: str) -> dict[int, Event]:
        """Return the names and bytes of what is alive at a mark, by address; only after leaving."""
        return self._named[mark]

    def _draw_curve(self) -> None:
        """Add up the events by time; ``_curve[i]`` are the bytes alive after ``i`` events.

        On the CPU a free counts only if its allocation was seen. The profiler remembers the addresses of storages that
        outlived an earlier trace, and mistakes the free of a later tensor at such an address for theirs.
        """
        alive, names = self._alive, self._new_names
        for event in sorted(self._events(), key=lambda event: event.start_time_ns):
            if event.name == "[memory]":
                change = event.extra_fields
                if change.device.type != self._device:
                    continue
                if self._device == "cuda":
                    self._make_up(change)
                if change.alloc_size > 0:
                    alive[change.ptr] = (next(names), change.alloc_size)
                    self._enter(alive[change.ptr], change.alloc_size)
                    if self._made_node is not None:
                        self.origins[alive[change.ptr][0]] = self._origin(event, self._made_node)
                elif change.ptr in alive:
                    name, amount = alive.pop(change.ptr)
                    self._enter((name, 0), -amount)
                elif self._device == "cuda":
                    self._enter_unseen(change.alloc_size)
            elif event.name.startswith(_MARK):
                mark = event.name.removeprefix(_MARK)
                self._marks[mark] = len(self.events)
                self._named[mark] = dict(alive)

    def _make_up(self, change: Any) -> None:
        """Enter the bytes that no event told of before this one: a block that was freed, or else unseen ones."""
        counted = change.total_allocated - change.alloc_size
        if self._before is None:
            self._before = counted - self._curve[-1]
        missed = counted - self._before - self._curve[-1]
        if not missed:
            return
        candidates = (change.ptr, *reversed(self._alive))
        freed = next((each for each in candidates if self._alive.get(each, (0, 0))[1] == -missed), None)
        if freed is None:
            self._enter_unseen(missed)
        else:
            self._enter((self._alive.pop(freed)[0], 0), missed)

    def _enter_unseen(self, change: int) -> None:
        self._unseen += change
        self._enter((UNSEEN, self._unseen), change)

    def _enter(self, event: Event, change: int) -> None:
        self.events.append(event)
        self._curve.append(self._curve[-1] + change)

    def _events(self) -> Iterator[Any]:
        """Yield the profiler's events, outer events before inner ones."""
        assert self._profile.kineto_results is not None
        waiting: list[Any] = list(reversed(self._profile.kineto_results.experimental_event_tree()))
        while waiting:
            event = waiting.pop()
            waiting += reversed(event.children)
            yield event

    def _origin(self, event: Any, made_node: MadeNode) -> Origin:
        """Return the innermost module around an event, and the outermost operator inside it that a backend runs."""
        operator = inner = node = ""
        around = event.parent
        while around is not None:
            name = around.name
            if name.startswith(_MODULE):
                return Origin(name.removeprefix(_MODULE), operator or inner or _PYTHON)
            if name.startswith(_NODE):
                node = name.removeprefix(_NODE)
                module = made_node(around.extra_fields.sequence_number)
                return Origin(module, operator or inner or node)
            if _is_operator(name):
                inner = inner or name
                operator = operator if _is_composite(name) else name
            around = around.parent
        return Origin(OUTSIDE, operator or inner or _PYTHON)


@functools.cache
def _is_composite(name: str) -> bool:
    """Return whether an operator only calls other operators, so that simulated steps do not see it."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    overloads = [f"{name}.{each}".removesuffix(".default") for each in ([] if packet is None else packet.overloads())]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(torch._C._dispatch_has_kernel(each) and has(each, "CompositeImplicitAutograd") for each in overloads)


_PYTHON = "a number of Python's"


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith(("autograd::", "torch::"))
