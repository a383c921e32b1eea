"""The memory of the simulated card while a script runs: what ``torch.cuda`` says of it, and where it runs out."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import Pools
from actbench.simulator.tracker import StorageTracker
from actbench.tools.script.places import CheckedTracker
from actbench.units import format_bytes


class CardMemory:
    """Counts what a tracker has seen as torch's caching allocator does, in bytes.

    With ``raise_oom``, :meth:`check` raises where memory runs out, and an allocation that fails is left out.

    Attributes:
        name: Of the card; ``capability`` is its compute capability.
        total_bytes: Its memory, or the smaller limit that a step was given.
        devices: How many such cards there are.
    """

    def __init__(
        self, profile: DeviceProfile, tracker: StorageTracker, total_bytes: int, devices: int, *, raise_oom: bool
    ) -> None:
        self.name = profile.name
        self.capability = profile.compute_capability or (0, 0)
        self.total_bytes, self.devices = total_bytes, devices
        self._tracker = tracker
        streams = tracker.communicated.streams
        self._empty = partial(Pools, total_bytes, expandable=False, streams=streams, refuses=raise_oom)
        self._pools = self._empty()
        self._has_failed = False
        self._held: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._played = self._live_bytes = self._peak_bytes = self._most_reserved_bytes = 0

    def allocated_bytes(self) -> int:
        """Return the bytes of the tensors that are alive."""
        return self._tracker.live_bytes

    def peak_allocated_bytes(self) -> int:
        """Return the most of them since :meth:`reset_peak`."""
        self._play()
        return self._peak_bytes

    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has of the card."""
        self._play()
        return self._pools.reserved_bytes

    def peak_reserved_bytes(self) -> int:
        """Return the most of them since :meth:`reset_peak`."""
        self._play()
        return max(self._most_reserved_bytes, self._pools.reserved_bytes)

    def most_reserved_bytes(self) -> int:
        """Return the most of them since the script began, or since :meth:`restart`."""
        self._play()
        return self._pools.peak_bytes

    def reset_peak(self) -> None:
        """Begin new peaks at the bytes of now."""
        self._play()
        self._peak_bytes, self._most_reserved_bytes = self._live_bytes, self._pools.reserved_bytes

    def empty_cache(self) -> None:
        """Give back to the card what is reserved and wholly free."""
        self._play()
        self._pools.give_back()

    def restart(self, state: Set[int]) -> Callable[[], None]:
        """Hold what is alive now, as if nothing else had ever been allocated.

        ``state`` names storages of optimizer state, which the allocator gets when an optimizer steps: it cuts them from
        what the passes before have left. Returns what ends the wait for that step: no hook may be left behind.
        """
        self._play()
        self._pools, self._has_failed = self._empty(), False
        self._waiting = {name: amount for name, amount in self._held.items() if name in state}
        self._pools.play((name, amount) for name, amount in self._held.items() if name not in state)
        self.reset_peak()
        return register_optimizer_step_pre_hook(self._make_state).remove

    def _make_state(self, *_: Any) -> None:
        self._play()
        self._pools.play(self._waiting.items())
        self._waiting = {}

    def watch(self, failed_before: Callable[[], object]) -> None:
        """Let the tracker :meth:`check` at each operator from now on, if it is one that can."""
        if isinstance(self._tracker, CheckedTracker):
            self._tracker.check = partial(self.check, failed_before)

    def check(self, failed_before: Callable[[], object]) -> None:
        """Raise torch's OutOfMemoryError where an allocation since the last call would have failed on the card.

        The first call after such an error calls ``failed_before``: what the error interrupted is freed by then.
        """
        if self._has_failed:
            self._has_failed = False
            failed_before()
        self._play()
        if self._pools.is_exceeded:
            self._pools.is_exceeded, self._has_failed = False, True
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Simulated: {self.name} has a total capacity of "
                f"{format_bytes(self.total_bytes)}, and {format_bytes(self._live_bytes)} are asked for at once"
            )

    def _play(self) -> None:
        """Follow what was allocated and freed since the last call."""
        assert self._tracker.live_bytes >= 0  # counts what waits to be counted
        events = self._tracker.events
        for name, amount in events[self._played :]:
            self._live_bytes += amount - self._held.pop(name, 0)
            if amount:
                self._held[name] = amount
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            if name in self._waiting:
                self._waiting[name] = amount
            else:
                self._pools.play(((name, amount),))
            self._most_reserved_bytes = max(self._most_reserved_bytes, self._pools.reserved_bytes)
        self._played = len(events)
