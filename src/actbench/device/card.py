"""Answers torch's queries about a simulated CUDA device."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from actbench.device import driver, streams
from actbench.device.generators import CardGenerator, Generator, card_generator
from actbench.device.patches import Patches
from actbench.device.properties import LOAD, Counters, DeviceProperties
from actbench.errors import MeasurementError, UsageError

__all__ = ["Counters", "cached_answers", "simulated_device"]

_ASK_ONCE = ("accelerate", "bitsandbytes", "diffusers", "lightning", "peft", "pytorch_lightning", "transformers", "trl")
"""Libraries with cached functions such as ``is_torch_cuda_available``."""

_CUDA_VERSION = "12.8"
"""The version of CUDA that a build of torch without CUDA reports."""


@contextmanager
def simulated_device(counters: Counters, note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Simulate a CUDA device for torch and what is built on it, inside the block; restore everything after it.

    Args:
        counters: The card, and what it counts.
        note: Is called with each thing that a script asks of the card and that is not simulated, once a thing.

    Raises:
        UsageError: There is such a card already.
    """
    refuse_nested()
    noted: set[str] = set()

    def note_once(text: str) -> None:
        if text not in noted:
            noted.add(text)
            note(text)

    selected = streams.Selected(counters.devices)
    generators = tuple(card_generator(index) for index in range(counters.devices))
    # what is entered first comes last: no answer that was given inside may outlive the block
    with ExitStack() as stack:
        stack.callback(_clear_cached_answers)
        patches = stack.enter_context(Patches())
        # a run that has seen enough ends anywhere
        patches.callback(torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda"))
        patches.callback(torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda"))
        for functions in (
            driver.cuda_functions(counters, selected, note_once),
            driver.accelerator_functions(counters, selected, generators),
            driver.missing_functions(),
        ):
            for name, function in functions.items():
                patches.set(torch._C, name, function)
        _patch_state(patches, counters, generators)
        _patch_classes(patches)
        _patch_sensors(patches, counters, note_once)
        _profile_the_host_only(patches, note_once)
        _clear_cached_answers()
        yield


def refuse_nested() -> None:
    """Raise a UsageError if this process has a simulated card already."""
    if isinstance(vars(torch.cuda)["_cudart"], driver.Runtime):
        raise UsageError(
            "a simulation inside of another: this process has a simulated card already; leave that block first, or, in "
            "a script for 'actbench run', leave actbench.simulate out"
        )


def _patch_state(patches: Patches, counters: Counters, generators: tuple[CardGenerator, ...]) -> None:
    """Replace what torch keeps of the card in its Python modules."""
    cuda = torch.cuda
    patches.replace(
        cuda,
        # torch.cuda._lazy_init would call the driver
        _initialized=True,
        _cached_device_count=counters.devices,
        _is_in_bad_fork=lambda: False,
        _cudart=driver.Runtime(counters),
        # torch.cuda took these from torch._C when it was imported
        _exchange_device=torch._C._cuda_exchangeDevice,
        _maybe_exchange_device=torch._C._cuda_maybeExchangeDevice,
        _CudaDeviceProperties=DeviceProperties,
        # torch would make a tensor on the card to find out
        _check_bf16_tensor_supported=lambda device: True,
        default_generators=generators,
    )
    # set, not replaced: torch has the name only once _lazy_init has run (torch/cuda/__init__.py)
    patches.set(cuda, "_get_device_properties", driver.properties_of(counters))
    patches.replace(torch.accelerator, get_device_capability=driver.supported_dtypes(counters))
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", _CUDA_VERSION)
    patches.replace(torch.cuda.nvtx, _nvtx=_Ranges())


def _patch_classes(patches: Patches) -> None:
    """Replace the classes whose objects only a driver can make."""
    patches.replace(torch, Stream=streams.Stream, Event=streams.Event, Generator=Generator)
    for module in (torch.cuda, torch.cuda.streams):
        patches.replace(module, Stream=streams.Stream, ExternalStream=streams.ExternalStream, Event=streams.CudaEvent)
    # this module too took the function from torch._C when it was imported
    patches.replace(torch.cuda.graphs, _cuda_isCurrentStreamCapturing=torch._C._cuda_isCurrentStreamCapturing)
    patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name in ("CUDAGraph", "graph", "make_graphed_callables"):
        for module in (torch.cuda, torch.cuda.graphs):
            patches.replace(module, **{name: _refused(f"torch.cuda.{name}")})
    patches.replace(torch.accelerator, Graph=_refused("torch.accelerator.Graph"))
    for module in (torch.cuda, torch.cuda.memory):
        patches.replace(module, MemPool=_refused("torch.cuda.MemPool"))


def _refused(name: str) -> type:
    """Return a class, as libraries name it in annotations and derive from it, that has no objects."""

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        caller = sys._getframe(1)
        raise MeasurementError(
            f"{name} cannot be simulated: a replayed CUDA graph calls no operators, and private memory pools are not "
            f"counted; run {caller.f_code.co_filename}:{caller.f_lineno} without it"
        )

    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__module__": "torch.cuda"})


def _patch_sensors(patches: Patches, counters: Counters, note: Callable[[str], None]) -> None:
    """Replace what torch asks NVML, which needs a driver."""

    def sensor(name: str, unit: str) -> Callable[..., int]:
        value = LOAD[name]

        def read(device: Any = None) -> int:
            note(f"torch.cuda.{name}: a simulated card has no sensors, and reports {value} {unit}")
            return value

        return read

    def processes(device: Any = None) -> str:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        mib = counters.reserved_bytes() / 2**20
        return f"GPU:{index}\nprocess {os.getpid():>10d} uses {mib:>12.3f} MB GPU memory"

    patches.replace(
        torch.cuda,
        utilization=sensor("utilization", "%"),
        memory_usage=sensor("memory_usage", "%"),
        temperature=sensor("temperature", "degrees Celsius"),
        power_draw=sensor("power_draw", "mW"),
        clock_rate=sensor("clock_rate", "MHz"),
        device_memory_used=lambda device=None: counters.reserved_bytes(),
    )
    # torch.cuda has names of torch.cuda.memory as its own
    for module in (torch.cuda, torch.cuda.memory):
        patches.replace(module, list_gpu_processes=processes)


def _profile_the_host_only(patches: Patches, note: Callable[[str], None]) -> None:
    """Leave the card out of torch's profilers, whose C++ would ask the driver at each operator."""
    profile = torch.autograd.profiler.profile
    start = profile.__init__

    def of_the_host(self: Any, *arguments: Any, **keywords: Any) -> None:
        if keywords.pop("use_device", None) or keywords.pop("use_cuda", False):
            note("torch.profiler: a simulated card runs no kernels; only the host is profiled")
        start(self, *arguments, **keywords)

    patches.set(profile, "__init__", of_the_host)


class _Ranges(types.SimpleNamespace):
    """Stands in for NVTX, whose ranges only a profiler of the real card reads."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Return a function that marks nothing."""
        return lambda *_: 0


def _clear_cached_answers() -> None:
    """Clear the caches of functions of libraries: they have asked about another card, or none."""
    for function in cached_answers(len(sys.modules)):
        function.cache_clear()


@functools.lru_cache(1)
def cached_answers(modules: int) -> list[Any]:
    """Return the functions with a cache of the libraries among so many imported modules.

    A search takes 12 ms, and a forked process then copies the memory of all modules: what forks calls it before.
    """
    return [
        value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _ASK_ONCE
        for value in list(getattr(module, "__dict__", {}).values())
        if type(value) is functools._lru_cache_wrapper
    ]
