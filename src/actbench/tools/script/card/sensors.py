"""What the driver's own tools say of a simulated card: NVML, which pynvml asks, and the command ``nvidia-smi``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import torch

from actbench.device.patches import Patches, replaced
from actbench.device.properties import LOAD, Counters, DeviceProperties
from actbench.tempfiles import temporary_folder
from actbench.tools.script.card import nvidiasmi
from actbench.units import MIB

_DRIVER = "580.65.06"
"""The version of the driver: of those that run the CUDA of current builds of torch."""


@contextmanager
def answered(counters: Counters) -> Iterator[None]:
    """Inside the block, let pynvml and ``nvidia-smi`` answer as for the simulated card.

    The command is found by its name: its folder is the first in ``PATH``. What it says is of the moment in which a
    process is started.
    """
    with Patches() as patches, temporary_folder() as folder:
        patches.replace(pynvml, **_nvml_functions(counters))
        file, command = folder / "answers.json", folder / "nvidia-smi"
        words = shlex.join([sys.executable, "-I", "-S", nvidiasmi.__file__, str(file)])
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        command.chmod(0o700)
        told: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda own: _telling(own, counters, file)  # noqa: E731
        patches.enter_context(replaced(subprocess.Popen, "_execute_child", told))
        patches.enter_context(replaced(os, "system", told))
        path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        patches.update(os.environ, {"PATH": path})
        yield


def _telling(own: Callable[..., Any], counters: Counters, file: Path) -> Callable[..., Any]:
    def start(*args: Any, **kwargs: Any) -> Any:
        file.write_text(json.dumps(_answers(counters)), encoding="utf-8")
        return own(*args, **kwargs)

    return start


def _uuid(counters: Counters, index: int) -> str:
    return f"GPU-{DeviceProperties.of(counters, index).uuid}"


def _used_bytes(counters: Counters) -> int:
    """Return what the driver counts of the first card: what torch has reserved, and the context of the process."""
    return counters.total_bytes - counters.free_bytes()


def _answers(counters: Counters) -> dict[str, Any]:
    """Return what ``nvidia-smi`` says, by the names of its queries; bytes are of the card that this process has."""
    used, total = _used_bytes(counters) // MIB, counters.total_bytes // MIB
    cards = [
        {
            "index": index,
            "name": counters.name,
            "uuid": _uuid(counters, index),
            "compute_cap": "{}.{}".format(*counters.capability),
            "memory.total": total,
            "memory.used": 0 if index else used,
            "memory.free": total if index else max(total - used, 0),
            "memory.reserved": 0,
            "utilization.gpu": LOAD["utilization"],
            "utilization.memory": LOAD["memory_usage"],
            "temperature.gpu": LOAD["temperature"],
            "power.draw": f"{LOAD['power_draw'] / 1000:.2f}",
            "clocks.sm": LOAD["clock_rate"],
            "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
            "pstate": "P0",
        }
        for index in range(counters.devices)
    ]
    process = dict.fromkeys(("process_name", "name"), sys.executable) | {"index": 0, "uuid": cards[0]["uuid"]}
    return {
        "machine": {"driver_version": _DRIVER, "cuda_version": torch.version.cuda, "count": counters.devices},
        "cards": cards,
        "processes": [{**process, "pid": os.getpid(), "used_gpu_memory": used}],
    }


def _nvml_functions(counters: Counters) -> dict[str, Any]:
    """Return functions of pynvml, by name; the handle of a card is its number. Others say that it has no such thing."""

    def handle(index: int) -> int:
        if not 0 <= int(index) < counters.devices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)  # type: ignore[no-untyped-call]
        return int(index)

    def by_uuid(uuid: str | bytes) -> int:
        known = {_uuid(counters, index): index for index in range(counters.devices)}
        return handle(known.get(uuid.decode() if isinstance(uuid, bytes) else uuid, -1))

    def memory(card: int, version: Any = None) -> Any:
        used = 0 if card else _used_bytes(counters)
        found = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        found.total, found.used, found.free = counters.total_bytes, used, max(counters.total_bytes - used, 0)
        return found

    def processes(card: int) -> list[Any]:
        return [] if card else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=_used_bytes(counters))]

    def nothing(*_: Any) -> None: ...

    cuda = [int(each) for each in (torch.version.cuda or "0.0").split(".")[:2]]
    return {
        "_nvmlGetFunctionPointer": lambda name: lambda *_: pynvml.NVML_ERROR_NOT_SUPPORTED,
        **dict.fromkeys(("nvmlInit", "nvmlInitWithFlags", "nvmlShutdown"), nothing),
        "nvmlSystemGetDriverVersion": lambda: _DRIVER,
        **dict.fromkeys(
            ("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"),
            lambda: 1000 * cuda[0] + 10 * cuda[1],
        ),
        "nvmlDeviceGetCount": lambda: counters.devices,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetIndex": handle,
        "nvmlDeviceGetMinorNumber": handle,
        "nvmlDeviceGetName": lambda card: counters.name,
        "nvmlDeviceGetUUID": lambda card: _uuid(counters, card),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(
            gpu=LOAD["utilization"], memory=LOAD["memory_usage"]
        ),
        "nvmlDeviceGetTemperature": lambda card, sensor: LOAD["temperature"],
        "nvmlDeviceGetPowerUsage": lambda card: LOAD["power_draw"],
        "nvmlDeviceGetClockInfo": lambda card, kind: LOAD["clock_rate"],
        "nvmlDeviceGetCudaComputeCapability": lambda card: counters.capability,
        **dict.fromkeys(("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"), processes),
    }
