"""The place of a script among processes that train together: rank 0 of them, whose collectives move nothing.

What torchrun and ``accelerate launch`` tell a process stands in the environment. Groups of any backend are torch's fake
process groups; they say that they are of the backend that the script asked for.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import DebugLevel, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from actbench.device.patches import Patches
from actbench.device.reducer import reduce_fakes
from actbench.device.streams import CudaEvent, Stream
from actbench.device.works import Works
from actbench.errors import MeasurementError
from actbench.simulator.profiles import DeviceProfile
from actbench.tools.script.processes import collectives

_MOST_A_MACHINE = 8
"""Cards of one machine, where a profile has no rates."""

_BACKENDS = ("gloo", "nccl", "ucc")
_OTHER_SIZE = (
    "the script makes a group of {0} processes, and it runs as the first of {1}: give --gpus {0}, or let it take the "
    "number from the environment variable WORLD_SIZE, which torchrun sets"
)
_OTHER_RANK = (
    "the script takes rank {} of its process group, and only the first process is simulated: take the rank from the "
    "environment variable RANK"
)
_OTHER_GROUP = (
    "this process belongs to a process group ({}) already: simulate the script in a process of its own, or after "
    "torch.distributed.destroy_process_group()"
)
_CALLS = "it calls functions in other processes, and one process runs"
_ENGINES = {"deepspeed": "DeepSpeed", "megatron": "Megatron"}
_REFUSED = (
    "{} is not simulated: it trains by kernels, buffers and processes of its own; run the script with --meter cuda, or "
    "let torch share the model out: fully_shard does what ZeRO-3 does, parallelize_module is tensor parallel"
)


def cards_of_machine(processes: int, profile: DeviceProfile) -> int:
    """Return how many processes, each with a card, are on one machine: equally many, and as many as a machine takes."""
    most = profile.rates.links.devices if profile.rates else _MOST_A_MACHINE
    return max(count for count in range(1, min(processes, most) + 1) if processes % count == 0)


def environment(processes: int, local: int) -> dict[str, str]:
    """Return the environment that torchrun gives the first of ``processes``, ``local`` of which are on each machine."""
    return {
        "RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": str(processes // local),
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": str(processes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextmanager
def joined(
    processes: int, profile: DeviceProfile, note: Callable[[list[Tensor]], object], works: Works
) -> Iterator[None]:
    """Inside the block, let a script be the first of ``processes``; a group that it makes is left at the end.

    One process alone is told nothing, as by ``python``, but may make a group of one.

    Args:
        processes: How many train together.
        profile: The card of each.
        note: Receives buffers in which DistributedDataParallel averages gradients.
        works: Holds what asynchronous collectives hold.

    Raises:
        MeasurementError: This process belongs to a process group already.
    """
    if distributed.is_initialized():
        raise MeasurementError(_OTHER_GROUP.format(distributed.get_backend()))
    told = environment(processes, cards_of_machine(processes, profile)) if processes > 1 else {}
    with Patches() as patches:
        patches.update(os.environ, told)
        patches.callback(setattr, sys, "excepthook", sys.excepthook)  # torch sets one that says the rank
        patches.callback(_leave)
        _let_backends_be_fake(patches)
        patches.set(c10d, "rendezvous", _meeting(processes, patches))
        for owner in (distributed, c10d):
            patches.set(owner, "init_process_group", _beginning(owner.init_process_group, processes, patches))
            patches.set(owner, "TCPStore", _LonelyStore)
        patches.set(c10d, "get_debug_level", lambda: DebugLevel.OFF)  # else groups check each other
        for name, change in collectives.CHANGES.items():
            if hasattr(c10d, name):
                changed = change(getattr(c10d, name), works)
                patches.set(c10d, name, changed)
                patches.set(distributed, name, changed)
        for name in ("_cuda_synchronize", "_accelerator_synchronizeDevice"):
            patches.set(torch._C, name, works.synchronize)
        for waiting in (Stream, CudaEvent):
            patches.set(waiting, "synchronize", works.synchronize)
        for owner in (distributed, c10d):
            patches.set(owner, "barrier", _waiting(distributed.barrier, works))
        patches.set(distributed.ProcessGroup, "monitored_barrier", lambda group, *_, **__: None)
        for name in ("init_rpc", "rpc_async", "rpc_sync", "remote"):
            own = getattr(distributed.rpc, name)
            patches.set(distributed.rpc, name, collectives.refused(f"rpc.{name}", _CALLS)(own, works))
        reduce_fakes(patches, works, note)
        yield


def _waiting(own: Callable[..., Any], works: Works) -> Callable[..., Any]:
    """Let a barrier free what ended works hold, as a collective, and wait for the card."""

    def barrier(*args: Any, **kwargs: Any) -> Any:
        works.free()
        works.synchronize()
        return own(*args, **kwargs)

    return functools.wraps(own)(barrier)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _let_backends_be_fake(patches: Patches) -> None:
    """Make groups of all backends fake, and let those for the card take tensors in host memory, too."""
    from torch.testing._internal.distributed import fake_pg

    def make(common: Any, options: Any) -> Any:
        _refuse_engines(sys._getframe(1))
        return fake_pg._create_fake_pg(common, None)  # type: ignore[no-untyped-call]

    backend = distributed.Backend
    plugin = backend._BackendPlugin(make, True)
    patches.update(backend._plugins, {name.upper(): plugin for name in _BACKENDS})
    patches.update(backend.backend_capability, {name: ["cpu", "cuda"] for name in _BACKENDS})
    own = c10d.BackendConfig.get_device_backend_map

    def of_devices(config: c10d.BackendConfig) -> Mapping[str, str]:
        found = own(config)
        return {"cpu": found["cuda"], **found} if "cuda" in found else found

    patches.set(c10d.BackendConfig, "get_device_backend_map", of_devices)
    for owner in (distributed, c10d):
        patches.replace(owner, is_nccl_available=lambda: True, is_gloo_available=lambda: True)


def _refuse_engines(frame: FrameType | None) -> None:
    """Raise a MeasurementError if an engine that is not simulated makes a group."""
    while frame is not None:
        engine = _ENGINES.get(str(frame.f_globals.get("__name__")).partition(".")[0])
        if engine is not None:
            raise MeasurementError(_REFUSED.format(engine))
        frame = frame.f_back


def refused_package(name: str | None) -> str | None:
    """Return why a package that trains by itself is not simulated; None for other packages."""
    engine = _ENGINES.get((name or "").partition(".")[0])
    return None if engine is None else _REFUSED.format(engine)


class _LonelyStore(TCPStore):
    """A store that waits for no other process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args[:5], **{**options, "wait_for_workers": False})  # the sixth is whether it waits


def _beginning(own: Callable[..., None], processes: int, patches: Patches) -> Callable[..., None]:
    """Let a group begin over a store of the script's own as it does over one of torch's."""
    signature = inspect.signature(own)

    def init_process_group(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        if given.arguments["store"] is not None:
            _refuse_others(given.arguments["world_size"], given.arguments["rank"], processes)
            _let_shared_tensors_be_fake(patches)
        own(*args, **options)

    return functools.wraps(own)(init_process_group)


def _refuse_others(world_size: int, rank: int, processes: int) -> None:
    """Raise a MeasurementError if a script makes a group of another size, or is another process of it."""
    if world_size not in (-1, processes):
        raise MeasurementError(_OTHER_SIZE.format(world_size, processes))
    if rank > 0:
        raise MeasurementError(_OTHER_RANK.format(rank))


def _meeting(processes: int, patches: Patches) -> Callable[..., Iterator[Any]]:
    """Return a rendezvous that waits for no other process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def meet(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        _refuse_others(world_size, rank, processes)
        _let_shared_tensors_be_fake(patches)
        yield FakeStore(), 0, processes

    return meet


def _let_shared_tensors_be_fake(patches: Patches) -> None:
    """Let DTensors find shapes outside of what is counted, and draw numbers without a generator of all processes."""
    from torch.distributed.tensor import _dispatch, _random, _sharding_prop  # imports as much as all of torch

    propagator = _sharding_prop.ShardingPropagator
    own = propagator._propagate_tensor_meta_non_cached

    def elsewhere(propagating: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return own(propagating, schema)

    patches.set(propagator, "_propagate_tensor_meta_non_cached", elsewhere)
    patches.replace(_dispatch, run_dtensor_rng_op=lambda start, end, op, *args, **options: op(*args, **options))
    for tracker in (_random._RNGStateTracker, _random.OffsetBasedRNGTracker):
        patches.replace(tracker, _distribute_region=lambda own, spec, generator=None: nullcontext())
