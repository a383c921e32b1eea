"""The GPU that torch would use, as the driver describes it, without importing torch or starting CUDA."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True)
class Gpu:
    """The first GPU that is visible.

    Attributes:
        name: As the driver calls it.
        memory_bytes: Its memory.
        driver: Version of the driver.
    """

    name: str
    memory_bytes: int
    driver: str


def find() -> Gpu | None:
    """Return the first visible GPU, or None where there is no driver or ``CUDA_VISIBLE_DEVICES`` hides all."""
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = _first_visible(nvml)
        if handle is None:
            return None
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
        return Gpu(_text(nvml.nvmlDeviceGetName(handle)), int(memory), _text(nvml.nvmlSystemGetDriverVersion()))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _first_visible(nvml: Any) -> Any | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return None  # empty or -1 hides every device, as for CUDA


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
