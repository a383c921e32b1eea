"""A simulated device: what runs inside its block finds a card that is not there, or the operators of a CPU.

On a simulated card tensors are fake ones of device ``cuda``; a simulated CPU has fake CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar

import torch

from actbench.device.card import simulated_device
from actbench.device.hooks import answered
from actbench.device.properties import Counters
from actbench.simulator.operators import card_operators, cpu_operators
from actbench.simulator.profiles import DeviceProfile


class _Block:
    """A block in which a device is simulated, and what was entered until its end."""

    def __init__(self, profile: DeviceProfile, stack: ExitStack) -> None:
        self.profile, self.stack = profile, stack
        self.entered: set[object] = set()


_inside: ContextVar[_Block | None] = ContextVar("_inside", default=None)

CPU = torch.device("cpu")
CARD = torch.device("cuda", 0)


class _Uncounted(Counters):
    """A card whose bytes are not counted yet."""

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

    def limit_to(self, fraction: float) -> str:
        return ""

    def configure(self, settings: str) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


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
        MeasurementError: This process has another simulated card already, or torch allows none.
    """
    outer = _inside.get()
    if outer is not None and outer.profile == profile:
        yield
        return
    with _block(profile) as stack:
        if profile.is_cuda:
            counters = counters or _Uncounted(profile)
            stack.enter_context(answered(counters.devices))
            stack.enter_context(card_operators(profile))
            stack.enter_context(simulated_device(counters, note))
        else:
            stack.enter_context(cpu_operators())
        yield


@contextmanager
def _block(profile: DeviceProfile) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        token = _inside.set(_Block(profile, stack))
        stack.callback(_inside.reset, token)
        yield stack


def place() -> torch.device:
    """Return where tensors are that are made fake here: on the simulated card inside a block of it, else on the CPU."""
    block = _inside.get()
    return CARD if block is not None and block.profile.is_cuda else CPU


def until_the_end(enter: Callable[[DeviceProfile], AbstractContextManager[None]]) -> None:
    """Enter a context of the simulated device until the end of its block; one that was entered is not entered again."""
    block = _inside.get()
    assert block is not None
    if enter not in block.entered:
        block.entered.add(enter)
        block.stack.enter_context(enter(block.profile))


@contextmanager
def operators_of(profile: DeviceProfile) -> Iterator[None]:
    """Inside the block, steps on fake tensors run the operators of a device.

    In a process that can use a real card, fake tensors of it need no simulated one.
    """
    if profile.is_cuda and torch.cuda.is_available() and _inside.get() is None:
        with _block(profile), card_operators(profile):
            yield
    else:
        with simulated(profile):
            yield
