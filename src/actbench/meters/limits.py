"""The memory limit of a step, and torch's ways of running out of memory as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from actbench.errors import OutOfMemoryError
from actbench.units import format_bytes


def check_limit(peak_bytes: int, memory_bytes: int, device: str) -> None:
    """Refuse a peak above what a step may use.

    Raises:
        OutOfMemoryError: The peak is above; it carries the peak.
    """
    if peak_bytes > memory_bytes:
        raise OutOfMemoryError(
            f"the step needs {format_bytes(peak_bytes)} on {device}, which may use {format_bytes(memory_bytes)};"
            " take a smaller --batch-size or another --scheme",
            peak_bytes,
        )


@contextmanager
def allocation_failures(device: str, memory_bytes: int) -> Iterator[None]:
    """Turn a failed allocation, by whichever of torch's errors it shows, into an :class:`OutOfMemoryError`."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _failed(device, memory_bytes, error) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise _failed(device, memory_bytes, error) from error


def _failed(device: str, memory_bytes: int, error: BaseException) -> OutOfMemoryError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return OutOfMemoryError(
        f"the step does not fit on {device}, which may use {format_bytes(memory_bytes)} ({reason});"
        " take a smaller --batch-size or another --scheme"
    )
