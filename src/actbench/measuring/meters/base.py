"""What all meters have in common, and the memory limit of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from actbench.errors import ActbenchError, OutOfMemoryError, is_out_of_memory
from actbench.results.records import MeterName
from actbench.setup import Batch, TrainingSetup, TrainStep
from actbench.units import format_bytes


@dataclass(frozen=True)
class MemoryReading:
    """Bytes of one training step in the steady state (optimizer state present); None where a meter cannot know."""

    weights_bytes: int
    gradients_bytes: int | None
    optimizer_bytes: int | None
    activation_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    loss: float | None = None


class Meter(Protocol):
    """Reads bytes and seconds of a training step on one kind of device.

    Attributes:
        materialize: Whether it needs a model with real weights.
        memory_bytes: Memory that a step may use: the memory limit, or what the device has.
    """

    name: MeterName
    materialize: bool
    memory_bytes: int

    def active(self) -> AbstractContextManager[Any]:
        """Enter what building batches and running steps need (a fake tensor mode, operators, a limit)."""

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this meter's device."""

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to this meter's device, in place, before any scheme is applied."""

    def place(self, batch: Batch) -> Mapping[str, Any]:
        """Bring a batch to this meter's device."""

    def memory(self, step: TrainStep) -> MemoryReading:
        """Run the step twice, first to reach the steady state, and read the bytes of the second run.

        Raises:
            OutOfMemoryError: The step needs more than ``memory_bytes``.
        """

    def seconds(self, step: TrainStep, steps: int) -> tuple[float, ...] | None:
        """Run ``steps`` steps and return the seconds of each, or None when this meter has no clock."""


def check_limit(peak_bytes: int, memory_bytes: int, device: str) -> None:
    """Raise an OutOfMemoryError, which carries the peak, for one above what a step may use."""
    if peak_bytes > memory_bytes:
        raise OutOfMemoryError(
            f"the step needs {format_bytes(peak_bytes)} on {device}, which may use {format_bytes(memory_bytes)};"
            " take a smaller --batch-size or another --scheme",
            peak_bytes,
        )


@contextmanager
def allocation_failures(device: str, memory_bytes: int) -> Iterator[None]:
    """Turn a failed allocation of any kind into an :class:`OutOfMemoryError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ActbenchError) or not is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OutOfMemoryError(
            f"the step does not fit on {device}, which may use {format_bytes(memory_bytes)} ({reason});"
            " take a smaller --batch-size or another --scheme"
        ) from error


def moved(batch: Batch, device: str | torch.device) -> Batch:
    """Return a batch with its tensors, in any nesting, on a device."""
    found: Batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(batch))
    return found
