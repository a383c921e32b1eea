"""The device that is timed, and the state of the process that times it."""

from __future__ import annotations

from typing import Literal

import torch

from actbench.errors import MeasurementError

DeviceName = Literal["cpu", "cuda"]

_LARGEST_KEPT = 31 << 20


def device_named(name: DeviceName) -> torch.device:
    """Return the device of this name.

    Raises:
        MeasurementError: The device is missing.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(
            "--device cuda: torch finds no CUDA device here; 'actbench doctor' says what is missing, and --device cpu "
            "measures the processor"
        )
    return torch.device(name)


def settle_heap() -> None:
    """Bring the heap of the C library into the state of a process that has trained for a while.

    The C library maps each tensor larger than any freed before, and a mapping costs page faults: 3 ms for 6 MiB, more
    than a layer takes. A freed tensor of up to 32 MiB raises this limit (``DEFAULT_MMAP_THRESHOLD_MAX``).
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # freed at once
