"""Copying kept tensors to host memory and back.

On CUDA both run on a stream of their own, beside what the device computes. No block of memory is freed with a copy
pending: what leaves is held until it was waited for, and what comes back was allocated on the stream that needs it, so
that the computing stream has waited for either copy before it can be given the block again. The bytes held therefore do
not depend on how far the host has run ahead, as they would with ``Tensor.record_stream``. Host memory is page-locked,
and comes from torch's pool of such blocks, which gives the blocks of one step to the next.

Everywhere else, and on fake tensors, copies are made when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from actbench.ops.host import from_host, to_host

Tensors = tuple[Tensor, ...]


class Copied(NamedTuple):
    """Tensors that are being copied to, and what makes the stream that asked for the copy wait for it."""

    tensors: Tensors
    settle: Callable[[], None]


class Copies(Protocol):
    """Who copies."""

    def away(self, tensors: Tensors) -> Copied:
        """Start to copy tensors of the device to host memory."""

    def back(self, tensors: Tensors) -> Copied:
        """Start to copy tensors in host memory to the device."""


class AtOnce:
    """Copies when asked for.

    Args:
        device: Where tensors come back to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def away(self, tensors: Tensors) -> Copied:
        """Copy to host memory."""
        return Copied(tuple(to_host(tensor) for tensor in tensors), _nothing)

    def back(self, tensors: Tensors) -> Copied:
        """Copy to the device."""
        return Copied(tuple(from_host(tensor, self._device) for tensor in tensors), _nothing)


class OnTheSide:
    """Copies on a stream of its own, behind what is queued on the stream that is current when it is asked.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def away(self, tensors: Tensors) -> Copied:
        """Queue copies to page-locked memory."""
        return self._queued(lambda: tuple(to_host(tensor) for tensor in tensors))

    def back(self, tensors: Tensors) -> Copied:
        """Queue copies to blocks that are allocated on the current stream."""
        blocks = tuple(torch.empty_like(tensor, device=self._device) for tensor in tensors)
        return self._queued(
            lambda: tuple(block.copy_(held, non_blocking=True) for block, held in zip(blocks, tensors, strict=True))
        )

    def _queued(self, copy: Callable[[], Tensors]) -> Copied:
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            tensors = copy()
        copied = self._stream.record_event()
        return Copied(tensors, lambda: _wait(copied, computing, tensors))


def _wait(copied: torch.cuda.Event, computing: torch.cuda.Stream, tensors: Tensors) -> None:
    """Let the stream that asked for a copy wait for it, and the one that is current now, if that is another."""
    computing.wait_event(copied)
    for tensor in tensors:
        current = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else computing
        if current != computing:
            current.wait_event(copied)
            tensor.record_stream(current)


def _nothing() -> None:
    """A copy that was made at once is waited for by nobody."""
