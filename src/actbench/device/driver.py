"""The functions in C that ``torch.cuda`` and ``torch.accelerator`` are built on, as a simulated card answers them.

They are replaced where torch's own Python looks them up, so that names that others imported before are answered too,
and checks of arguments, layouts of tables and aliases stay torch's. A build without CUDA lacks some; it is given them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from actbench.device.generators import CardGenerator
from actbench.device.properties import Counters, DeviceProperties, memory_stats
from actbench.device.streams import CUDA, Selected, Stream, checked
from actbench.errors import MeasurementError

_HALVES = (torch.float16, torch.bfloat16)
_NCCL = 2 << 32 | 27 << 16 | 3
"""The version that a build without NCCL names, as torch packs it: 2.27.3."""


def cuda_functions(counters: Counters, selected: Selected, note: Callable[[str], None]) -> dict[str, Any]:
    """Return what ``torch._C`` has for ``torch.cuda``, by name."""

    def set_fraction(fraction: float, device: int) -> None:
        fractions[device] = fraction
        if device == 0:  # this is the first process
            note(counters.limit_to(fraction))

    def record_history(*_: Any, **__: Any) -> None:
        note("torch.cuda.memory._record_memory_history: left out; use --timeline for what is allocated when")

    fractions: dict[int, float] = {}
    architecture = "sm_{}{}".format(*counters.capability)
    built_for = (torch._C._cuda_getArchFlags() or "").split() if hasattr(torch._C, "_cuda_getArchFlags") else []
    host = {name: {"current": 0, "peak": 0, "allocated": 0, "freed": 0} for name in ("allocations", "allocated_bytes")}
    needing = ("cudaCachingAllocator_raw_alloc", "getCurrentBlasHandle", "getCurrentSolverHandle", "customAllocator")
    return {f"_cuda_{name}": _needs_driver(name) for name in needing} | {
        "_cuda_getDeviceCount": lambda: counters.devices,
        "_cuda_init": _nothing,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDevice": lambda: selected.index,
        "_cuda_setDevice": selected.select,
        "_cuda_exchangeDevice": selected.exchange,
        "_cuda_maybeExchangeDevice": lambda index: selected.exchange(index),  # Dynamo wants two functions
        "_cuda_hasPrimaryContext": lambda index: index == selected.index,
        "_cuda_canDeviceAccessPeer": lambda index, other: index != other,
        "_cuda_getArchFlags": lambda: " ".join(dict.fromkeys([*built_for, architecture])),
        "_cuda_synchronize": _nothing,
        "_cuda_sleep": _nothing,
        "_cuda_ipc_collect": _nothing,
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentStream": selected.current,
        "_cuda_getCurrentRawStream": lambda index: selected.current(index)[0],
        "_cuda_getDefaultStream": selected.default,
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, CUDA),
        "_cuda_setStream": selected.set_stream,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_emptyCache": lambda *_: counters.empty_cache(),
        "_cuda_memoryStats": lambda index: memory_stats(counters) if selected.checked(index) >= 0 else {},
        "_cuda_hostMemoryStats": lambda: host,
        "_cuda_resetAccumulatedMemoryStats": _nothing,
        "_cuda_resetPeakMemoryStats": lambda index: counters.reset_peak() if selected.checked(index) >= 0 else None,
        "_cuda_resetAccumulatedHostMemoryStats": _nothing,
        "_cuda_resetPeakHostMemoryStats": _nothing,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda index: fractions.get(index, 1.0),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": [[]], "allocator_settings": {}},
    }


def accelerator_functions(
    counters: Counters, selected: Selected, generators: tuple[CardGenerator, ...]
) -> dict[str, Any]:
    """Return what ``torch._C`` has for ``torch.accelerator``, by name."""

    def current_stream(index: int) -> Stream:
        number, place, _ = selected.current(index)
        return Stream(stream_id=number, device_index=place)

    def set_stream(stream: Any) -> None:
        selected.set_stream(stream.stream_id, stream.device_index)

    def memory_info(index: int) -> tuple[int, int]:
        selected.checked(index)
        return counters.free_bytes(), counters.total_bytes

    return {
        "_get_accelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: selected.index,
        "_accelerator_setDeviceIndex": selected.select,
        "_accelerator_exchangeDevice": selected.exchange,
        "_accelerator_maybeExchangeDevice": selected.exchange,
        "_accelerator_getStream": current_stream,
        "_accelerator_setStream": set_stream,
        "_accelerator_synchronizeDevice": _nothing,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": lambda: counters.empty_cache(),
        "_accelerator_emptyHostCache": _nothing,
        "_accelerator_getDeviceStats": lambda index: memory_stats(counters),
        "_accelerator_resetAccumulatedStats": _nothing,
        "_accelerator_resetPeakStats": lambda index: counters.reset_peak(),
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_setAllocatorSettings": counters.configure,
        "_accelerator_getDefaultGenerator": lambda index: generators[index],
    }


def missing_functions() -> dict[str, Any]:
    """Return what a build of torch without CUDA lacks, and what its own answers are in a build with it."""
    told = {"_has_cuda": True, "_nccl_version": lambda: _NCCL, "_nccl_version_suffix": lambda: b""}
    return told if torch.version.cuda is None else {}


class Runtime:
    """Stands in for the CUDA runtime that ``torch.cuda.cudart()`` returns."""

    cudaError = types.SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        """Return free and total bytes of a card."""
        checked(device)
        return self.counters.free_bytes(), self.counters.total_bytes

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        """Return the text of an error; there is none."""
        return "no error"

    def __getattr__(self, name: str) -> Any:
        """Return a function that succeeds and does nothing: starts of profilers, registrations of host memory."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: 0


def supported_dtypes(counters: Counters) -> Callable[..., dict[str, Any]]:
    """Return ``torch.accelerator.get_device_capability``, whose answers torch keeps for ever."""
    types_of = (getattr(torch, name) for name in ("float64", "float32", "int64", "int32", "int16", "int8", "uint8"))
    known = {*types_of, *_HALVES, torch.bool, torch.complex64, torch.complex128}
    return lambda device=None, /: {"supported_dtypes": set(known)}


def properties_of(counters: Counters) -> Callable[[int], DeviceProperties]:
    """Return the function that torch's C code defines when it initializes CUDA."""
    cards = [DeviceProperties.of(counters, index) for index in range(counters.devices)]
    return lambda index: cards[index]


def _needs_driver(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise MeasurementError(
            f"torch's {name} cannot be simulated: it needs CUDA's driver, and is not counted; allocate tensors"
        )

    return refuse


def _nothing(*_: Any, **__: Any) -> None:
    """Return at once: work on the simulated card is done when its call returns."""
