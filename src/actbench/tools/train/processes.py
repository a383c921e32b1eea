"""The processes that train one model together: how their launcher asks for it, and what they exchange.

The first process alone writes files. What may fail, such as reading data, every process does for itself, and then all
go on or all stop: a process that failed alone would leave the others waiting for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from actbench.errors import MeasurementError, first_line
from actbench.measuring.processgroup import take_gpu
from actbench.tools.train.launch import Launch
from actbench.tools.train.records import DeviceName

T = TypeVar("T")

FAILURE_TIMEOUT = timedelta(seconds=60)  # in which the others must fail too


class StoppedError(MeasurementError):
    """Raised in a process that stops because the first one does, which tells why."""


class LostError(MeasurementError):
    """Raised where another process does not answer."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that train together, or alone."""

    launch: Launch = field(default_factory=Launch)
    _failure_group: dict[str, Any] = field(default_factory=dict)
    _joint_errors: list[Exception] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.launch.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.launch.size

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.launch.is_first

    @property
    def device(self) -> DeviceName:
        """What the device ``auto`` stands for."""
        return "cuda" if torch.cuda.is_available() and not self.launch.cpu else "cpu"

    def broadcast(self, value: T) -> T:
        """Return the value that the first process has."""
        if self.size == 1:
            return value
        box = [value]
        with _peers_answer():
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: T, group: Any = None) -> list[T]:
        """Return the values of all processes, by rank; ``group`` is torch's, where it is not the default one."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _peers_answer():
            distributed.all_gather_object(found, value, group=group)
        return found

    def mean(self, value: float) -> float:
        """Return the mean of a number over the processes."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        with _peers_answer():
            distributed.all_reduce(total)
        return total.item() / self.size

    def all_succeed(self, make: Callable[[], T]) -> T:
        """Run something that may fail in every process, and go on if it failed in none.

        ``make`` must not wait for other processes.

        Raises:
            StoppedError: In all but the first process, when it failed anywhere.
            Exception: In the first, what went wrong there; a MeasurementError for what went wrong in another.
        """
        failure: Exception | None = None
        try:
            value = make()
        except Exception as error:
            failure = error
        failures = self.all_gather(None if failure is None else str(failure))
        if all(message is None for message in failures):
            return value
        raise self._joint_failure(failure, failures)

    def end_run(self, failure: Exception | None) -> Exception | None:
        """Tell how a run ended here, and return how it ended for all; each process calls it once for each run.

        Raises:
            LostError: It failed here, and the others still wait for this process.
        """
        try:
            failures = self.all_gather(None if failure is None else str(failure), **self._failure_group)
        except LostError as error:
            raise error if failure is None else LostError(f"process {self.rank} failed alone: {failure}") from failure
        return None if all(message is None for message in failures) else self._joint_failure(failure, failures)

    def _joint_failure(self, failure: Exception | None, failures: list[str | None]) -> Exception:
        if not self.is_first:
            failure = StoppedError("stopped, as the first process says")
        elif failure is None:
            rank, message = next((rank, message) for rank, message in enumerate(failures) if message is not None)
            failure = MeasurementError(f"process {rank}: {message}")
        self._joint_errors.append(failure)
        return failure

    def is_joint(self, error: Exception) -> bool:
        """Return whether all processes stop by this error, so that none waits for another."""
        return any(error is joint for joint in self._joint_errors)


@contextmanager
def _peers_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo raises nothing narrower
        raise LostError(f"another process ended, or does not answer: {first_line(error)}") from error


SINGLE_PROCESS = ProcessGroup()


@contextmanager
def joined(launch: Launch) -> Iterator[ProcessGroup]:
    """Join the other processes inside the block; a MeasurementError if no GPU is left for this process."""
    if launch.size == 1:
        yield ProcessGroup(launch)
        return
    if os.environ.get("MASTER_PORT") is None:  # mpirun does not say where to meet
        os.environ.update(MASTER_ADDR=os.environ.get("MASTER_ADDR", "127.0.0.1"), MASTER_PORT="29500")
    distributed.init_process_group(_backend(launch), rank=launch.rank, world_size=launch.size)
    failure_group = {"group": distributed.new_group(backend="gloo", timeout=FAILURE_TIMEOUT)}
    group = ProcessGroup(launch, failure_group)
    try:
        yield group
    except Exception as error:
        if group.is_joint(error):  # else leaving would wait for those who wait for this process
            _leave(failure_group)
        raise
    _leave(failure_group)


def _leave(groups: dict[str, Any]) -> None:
    """Destroy the process group and drop what refers to it, so that its threads end.

    A gloo thread that frees a tensor while the interpreter ends aborts the process.
    """
    distributed.destroy_process_group()
    groups.clear()


def _backend(launch: Launch) -> str:
    if launch.cpu or not torch.cuda.is_available():
        return "gloo"
    take_gpu(launch.local_rank)
    return "cpu:gloo,cuda:nccl"
