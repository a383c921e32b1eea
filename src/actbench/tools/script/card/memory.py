"""The memory of the simulated card while a script runs: what ``torch.cuda`` says of it, and where it runs out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actbench.simulator.profiles import DeviceProfile
from actbench.simulator.reserved import Pools
from actbench.simulator.tracker import CheckedTracker, StorageTracker
from actbench.units import format_bytes

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator; torch reads the first that is set."""

_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^]]*\]|[^,]*)")
"""One of these settings: its name, and its value or the list of its values."""

_WITHOUT_EFFECT = {
    "backend": "native",
    "pinned_use_background_threads": None,
    "pinned_use_cuda_host_register": None,
    "pinned_num_register_threads": None,
    "pinned_reserve_segment_size_mb": None,
    "release_lock_on_cudamalloc": None,
}
"""Settings that change no bytes on the card, if they have this value; None for any."""


class CardMemory:
    """Counts what a tracker has seen as torch's caching allocator does, in bytes.

    With ``raise_oom``, :meth:`check` raises where memory runs out, and an allocation that fails is left out.

    Attributes:
        name: Of the card; ``capability`` is its compute capability.
        total_bytes: Its memory, or the memory limit that a step was given.
        limit_bytes: What of it the allocator may take: what a CUDA context leaves, or less if the script limits itself.
        devices: How many such cards there are.
        grows: Whether segments of the allocator grow.
        reserved_at: After how many events of the tracker how many bytes were reserved, wherever that changed.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        tracker: StorageTracker,
        memory_limit_bytes: int | None,
        devices: int,
        *,
        raise_oom: bool,
    ) -> None:
        self.name = profile.name
        self.capability = profile.compute_capability or (0, 0)
        self.total_bytes, self.devices = memory_limit_bytes or profile.memory_bytes, devices
        self.limit_bytes = self._room = profile.step_bytes(memory_limit_bytes)
        self._tracker, self._refuses = tracker, raise_oom
        self.grows = False
        self._left_out: dict[str, None] = {}
        self._pools = self._empty()
        self._is_configured = not profile.is_cuda
        self._limited = ""
        self._has_failed = False
        self._held: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self.reserved_at: list[tuple[int, int]] = []
        self._emptied_at: list[int] = []
        self._played = self._live_bytes = self._peak_bytes = self._most_reserved_bytes = 0

    def _empty(self) -> Pools:
        streams = self._tracker.communicated.streams
        return Pools(self.limit_bytes, expandable=self.grows, streams=streams, refuses=self._refuses)

    def limit_to(self, fraction: float) -> str:
        """Let the allocator take no more than a share of the card from now on; return what to say of it."""
        self._play()
        self._configure()
        return self._limit(fraction, "torch.cuda.set_per_process_memory_fraction")

    def configure(self, settings: str) -> None:
        """Let the allocator follow other settings from now on; what is alive is allocated anew by them."""
        self._play()
        self._configure()
        self._follow(settings)

    def limited(self) -> Iterator[str]:
        """Yield how the script limits itself, if it does, and which of its settings are left out."""
        self._play()
        if self._limited:
            yield self._limited
        for name in self._left_out:
            yield f"{name} of torch's allocator is not simulated: reserved bytes are those without it"

    def free_bytes(self) -> int:
        """Return the free bytes of the card."""
        return max(self._room - self.reserved_bytes(), 0)

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
        """Return fully free segments to the driver."""
        self._play()
        self._pools.give_back()
        self._emptied_at.append(self._played)

    def reserved_with(self, emptied: Iterable[int]) -> list[tuple[int, int]]:
        """Return what :attr:`reserved_at` has, had the script also emptied the cache at other moments, by events."""
        pools, events, begun = self._empty(), self._tracker.events, 0
        found: list[tuple[int, int]] = []
        for moment in sorted({*self._emptied_at, *emptied, len(events)}):
            for place, event in enumerate(events[begun:moment], begun + 1):
                pools.play((event,))
                if not found or found[-1][1] != pools.reserved_bytes:
                    found.append((place, pools.reserved_bytes))
            pools.give_back()
            found.append((moment, pools.reserved_bytes))
            begun = moment
        return found

    def is_led(self, begun: int, ended: int) -> bool:
        """Return whether the script limits the allocator, or empties its cache between two numbers of events."""
        return bool(self._limited) or any(begun <= moment <= ended for moment in self._emptied_at)

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
                f"{format_bytes(self.total_bytes)}, of which a step may take {format_bytes(self.limit_bytes)}, and "
                f"{format_bytes(self._live_bytes)} are asked for at once"
            )

    def _play(self) -> None:
        """Follow what was allocated and freed since the last call."""
        assert self._tracker.live_bytes >= 0  # counts what waits to be counted
        events = self._tracker.events
        if events:
            self._configure()
        for place, (name, amount) in enumerate(events[self._played :], self._played + 1):
            self._live_bytes += amount - self._held.pop(name, 0)
            if amount:
                self._held[name] = amount
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            if name in self._waiting:
                self._waiting[name] = amount
            else:
                self._pools.play(((name, amount),))
            reserved = self._pools.reserved_bytes
            if not self.reserved_at or self.reserved_at[-1][1] != reserved:
                self.reserved_at.append((place, reserved))
            self._most_reserved_bytes = max(self._most_reserved_bytes, reserved)
        self._played = len(events)

    def _configure(self) -> None:
        """Read the settings of the allocator when it begins, as torch does: a script may set them before."""
        if not self._is_configured:
            self._is_configured = True
            self._follow(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))

    def _follow(self, settings: str) -> None:
        for name, value in _SETTING.findall(settings):
            if name == "per_process_memory_fraction":
                self._limit(float(value), "per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF")
            elif name == "expandable_segments":
                self._grow(value.strip() == "True")
            elif _WITHOUT_EFFECT.get(name, value) not in (None, value.strip()) or name not in _WITHOUT_EFFECT:
                self._left_out[name] = None

    def _grow(self, grows: bool) -> None:
        """Let segments grow, or not."""
        if grows == self.grows:
            return
        self.grows, before = grows, self._pools
        self._pools = self._empty()
        self._pools.play((name, amount) for name, amount in self._held.items() if name not in self._waiting)
        self._pools.peak_bytes = max(self._pools.peak_bytes, before.peak_bytes)

    def _limit(self, fraction: float, by: str) -> str:
        self.limit_bytes = self._pools.limit_bytes = min(self._room, int(fraction * self.total_bytes))
        self._limited = f"{by} lets the script take {fraction:g} of the card, {format_bytes(self.limit_bytes)}"
        return self._limited
