"""The CPU meter: what torch's own allocator really hands out, and real seconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor
from torch.utils._pytree import tree_map

from actbench import hostmemory
from actbench.machine import available_memory_bytes
from actbench.meters import holdings
from actbench.meters.allocations import AllocationTrace
from actbench.meters.base import MemoryReading
from actbench.meters.limits import allocation_failures, check_limit
from actbench.records import MeterName
from actbench.training import Batch, TrainingSetup, TrainStep

_DEVICE = "the CPU"


class CpuMeter:
    """Reads the allocations of torch's CPU allocator, and the wall clock, in passes of their own.

    Args:
        memory_limit_bytes: Memory that a step may use; None for what is available on this machine now.
    """

    name: MeterName = "cpu"
    materialize = True

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        self.memory_bytes: int = memory_limit_bytes or available_memory_bytes()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Report allocations that fail as :class:`actbench.errors.OutOfMemoryError`."""
        with allocation_failures(_DEVICE, self.memory_bytes):
            yield

    def operators(self) -> AbstractContextManager[None]:
        """Let steps on fake tensors run the operators of this device."""
        return hostmemory.as_the_device()

    def adopt(self, setup: TrainingSetup) -> TrainingSetup:
        """Bring the module to the CPU, in place."""
        setup.module.to("cpu")
        return setup

    def place(self, batch: Batch) -> Batch:
        """Bring the batch to the CPU."""
        return {name: tree_map(_on_cpu, value) for name, value in batch.items()}

    def memory(self, step: TrainStep) -> MemoryReading:
        """Run the step twice and read the allocator's events of the second run.

        The first run is traced too: what it leaves behind, such as optimizer state, is then known to its last byte.

        Raises:
            OutOfMemoryError: An allocation failed, or the peak is above ``memory_bytes``; the second carries the peak.
        """
        base = holdings.stored_bytes(holdings.everything(step))
        with self.active(), AllocationTrace() as trace:
            step()
            gc.collect()
            trace.mark("begin")
            loss = step.forward()
            trace.mark("forward")
            step.backward(loss)
            gradients_bytes = holdings.stored_bytes(holdings.gradients(step))
            step.update()
            trace.mark("end")
        reading = MemoryReading(
            weights_bytes=holdings.stored_bytes(holdings.weights(step.setup.module)),
            gradients_bytes=gradients_bytes,
            optimizer_bytes=holdings.stored_bytes(holdings.optimizer_state(step.optimizer)),
            activation_bytes=trace.live_bytes("forward") - trace.live_bytes("begin"),
            peak_bytes=base + trace.peak_bytes("begin", "end"),
            loss=loss.item(),
        )
        check_limit(reading.peak_bytes, self.memory_bytes, _DEVICE)
        return reading

    def seconds(self, step: TrainStep, steps: int) -> tuple[float, ...]:
        """Run steps and return the wall time of each.

        Raises:
            OutOfMemoryError: An allocation failed.
        """
        taken = []
        with self.active():
            for _ in range(steps):
                started = time.perf_counter()
                step()
                taken.append(time.perf_counter() - started)
        return tuple(taken)


def _on_cpu(value: object) -> object:
    return value.to("cpu") if isinstance(value, Tensor) else value
