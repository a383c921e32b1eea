from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from actbench.records import MeterName
from actbench.training import Batch, TrainingSetup, TrainStep


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
        name: As in ``Case.meter``.
        materialize: Whether it needs a model with real weights.
        memory_bytes: Memory that a step may use: the memory limit, or what the device has.
    """

    name: MeterName
    materialize: bool
    memory_bytes: int

    def active(self) -> AbstractContextManager[Any]:
        """Enter what building batches and running steps need (a fake tensor mode, operator choices, a limit)."""
        ...

    def operators(self) -> AbstractContextManager[None]:
        """Enter where steps on fake tensors should run the operators of this meter's device."""
        ...

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to this meter's device, in place; called once, before any scheme is applied."""
        ...

    def place(self, batch: Batch) -> Mapping[str, Any]:
        """Bring a batch to this meter's device."""
        ...

    def memory(self, step: TrainStep) -> MemoryReading:
        """Run the step twice, once to reach the steady state, and read the bytes of the second run.

        Raises:
            OutOfMemoryError: The step needs more than ``memory_bytes``.
        """
        ...

    def seconds(self, step: TrainStep, steps: int) -> tuple[float, ...] | None:
        """Run ``steps`` steps and return the seconds of each, or None when this meter has no clock."""
        ...
