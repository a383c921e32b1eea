"""A simulated device: what runs inside its block finds a card that is not there, or the operators of a CPU.

On a simulated card tensors are fake ones of device ``cuda``; a simulated CPU has fake CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from actbench.device.card import believed
from actbench.device.hooks import answered
from actbench.device.properties import Counters
from actbench.simulator.operators import card_operators, cpu_operators
from actbench.simulator.profiles import DeviceProfile

_inside: ContextVar[DeviceProfile | None] = ContextVar("_inside", default=None)

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)


class _Uncounted(Counters):
    """A card whose bytes nobody counts yet."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.name, self.total_bytes, self.devices = profile.name, profile.memory_bytes, 1
        self.capability = profile.compute_capability or (0, 0)

    def allocated_bytes(self) -> int:
        return 0

    def peak_allocated_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0

    def peak_reserved_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return self.total_bytes


@contextmanager
def simulated(
    profile: DeviceProfile, counters: Counters | None = None, note: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Inside the block, fake tensors are on a simulated device; a block for the same device inside changes nothing.

    Args:
        profile: The device.
        counters: What a card counts; None for nothing.
        note: Is called with each thing that is asked of a card and that is not simulated, once a thing.

    Raises:
        MeasurementError: This process can use a real card, or has a simulated one already, or torch allows none.
    """
    if _inside.get() == profile:
        yield
        return
    token = _inside.set(profile)
    try:
        if not profile.is_cuda:
            with cpu_operators():
                yield
            return
        counters = counters or _Uncounted(profile)
        with answered(counters.devices), card_operators(profile), believed(counters, note):
            yield
    finally:
        _inside.reset(token)


def place() -> torch.device:
    """Return where tensors are that are made fake here: on the simulated card inside a block of it, else on the CPU."""
    profile = _inside.get()
    return CARD if profile is not None and profile.is_cuda else CPU


@contextmanager
def operators_of(profile: DeviceProfile) -> Iterator[None]:
    """Inside the block, steps on fake tensors run the operators of a device.

    In a process that can use a real card, fake tensors of it need no simulated one.
    """
    if profile.is_cuda and torch.cuda.is_available() and _inside.get() is None:
        with card_operators(profile):
            yield
    else:
        with simulated(profile):
            yield
