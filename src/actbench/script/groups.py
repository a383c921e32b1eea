"""The place of a script among processes that train together: rank 0 of them, whose collectives move nothing.

What torchrun and ``accelerate launch`` tell a script stands in its environment. Groups of any backend are of torch's
fake process groups, and say the backend that the script asked for.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._python_dispatch import _disable_current_modes

from actbench.errors import MeasurementError
from actbench.script.patches import Patches
from actbench.script.reducer import Logger, Reducer
from actbench.workloads import known

MOST_A_MACHINE = 8
"""Cards of one machine, where a profile does not say."""

_BACKENDS = ("gloo", "nccl", "ucc")
_OTHER_SIZE = (
    "the script makes a group of {} processes, and there are {}: give --gpus {}, or let the script take the number "
    "from the environment, as torchrun gives it"
)
_OTHER_RANK = "the script takes rank {} of its process group; only rank 0 is simulated: launch it as torchrun would"


def environment(processes: int, per_machine: int = MOST_A_MACHINE) -> dict[str, str]:
    """Return what torchrun tells the first of ``processes``, as many on each machine as its cards allow."""
    local = max(count for count in range(1, min(processes, per_machine) + 1) if processes % count == 0)
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
def joined(processes: int, per_machine: int = MOST_A_MACHINE) -> Iterator[None]:
    """Inside the block, let a script be the first of ``processes``; a group that it makes is left at the end.

    One process alone is told nothing, as by ``python``, but may make a group of one.

    Raises:
        MeasurementError: This process belongs to a process group already.
    """
    if distributed.is_initialized():
        raise MeasurementError(
            f"this process belongs to a process group ({distributed.get_backend()}): simulate a script in a process of "
            "its own, or after torch.distributed.destroy_process_group()"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    told = environment(processes, per_machine) if processes > 1 else {}
    with mock.patch.dict(os.environ, told), Patches() as patches:
        patches.callback(setattr, sys, "excepthook", sys.excepthook)
        patches.callback(_leave)
        _register(patches)
        patches.set(c10d, "rendezvous", _meeting(processes, FakeStore, patches))
        for name, function in (_objects() | {"all_reduce": _all_reduce(distributed.all_reduce)}).items():
            for owner in (distributed, c10d):
                patches.set(owner, name, function)
        patches.replace(distributed, Reducer=Reducer, Logger=Logger)
        patches.replace(distributed, _register_comm_hook=_hooked, _register_builtin_comm_hook=_hooked_by_name)
        yield


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _register(patches: Patches) -> None:
    """Make groups of all backends fake, for tensors on the card, which are the CPU's, too."""
    plugins = dict(distributed.Backend._plugins)
    fake = plugins["FAKE"]
    capability = distributed.Backend.backend_capability
    patches.enter_context(
        mock.patch.dict(distributed.Backend._plugins, {name.upper(): fake for name in _BACKENDS})
    )
    patches.enter_context(mock.patch.dict(capability, {name: ["cpu", "cuda"] for name in _BACKENDS}))
    own = c10d.BackendConfig.get_device_backend_map

    def of_devices(config: c10d.BackendConfig) -> Mapping[str, str]:
        found = own(config)
        return {"cpu": found["cuda"], **found} if "cuda" in found else found

    patches.set(c10d.BackendConfig, "get_device_backend_map", of_devices)
    for owner in (distributed, c10d):
        patches.replace(owner, is_nccl_available=lambda: True, is_gloo_available=lambda: True)
        patches.replace(owner, monitored_barrier=lambda *args, **options: None)


def _meeting(processes: int, store: Callable[[], Any], patches: Patches) -> Callable[..., Iterator[Any]]:
    """Return what lets a process meet the others: nobody is waited for."""

    def meet(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        if world_size not in (-1, processes):
            raise MeasurementError(_OTHER_SIZE.format(world_size, processes, world_size))
        if rank > 0:
            raise MeasurementError(_OTHER_RANK.format(rank))
        _settle_tensors(patches)
        yield store(), 0, processes

    return meet


def _settle_tensors(patches: Patches) -> None:
    """Let DTensors find shapes outside of what is counted, and draw numbers without states that processes agree on."""
    from torch.distributed.tensor import _dispatch, _random, _sharding_prop  # imports as much as all of torch

    def elsewhere(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return own(propagator, schema)

    propagator = _sharding_prop.ShardingPropagator
    own = propagator._propagate_tensor_meta_non_cached
    patches.set(propagator, "_propagate_tensor_meta_non_cached", elsewhere)
    patches.replace(_dispatch, run_dtensor_rng_op=lambda start, end, op, *args, **options: op(*args, **options))
    for tracker in (_random._RNGStateTracker, _random.OffsetBasedRNGTracker):
        patches.replace(tracker, _distribute_region=lambda own, spec, generator=None: nullcontext())


def _objects() -> dict[str, Callable[..., Any]]:
    """Return collectives of objects: those of all processes are this one's."""

    def all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather(object_gather_list, obj)

    def scatter(scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *_: Any, **__: Any) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    return {
        "all_gather_object": all_gather,
        "gather_object": gather,
        "scatter_object_list": scatter,
        "broadcast_object_list": lambda *args, **options: None,
    }


class _Done:
    """The work of a collective that is done, as :class:`torch.distributed.Work`; a fake group's has no results."""

    def __init__(self, work: Any, results: list[Tensor]) -> None:
        self._work, self._results = work, results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return the results, which are there."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> list[Tensor]:
        """Return the results."""
        return self._results


def _all_reduce(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let values that are known, which are the same in all processes, be added up as many times."""

    def all_reduce(tensor: Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = own(tensor, op=op, group=group, async_op=async_op)
        value = known.value_of(tensor)
        if value is not None and op == distributed.ReduceOp.SUM:
            with torch._C._DisableTorchDispatch(), torch.no_grad():
                value.mul_(distributed.get_world_size(group))
        return None if work is None else _Done(work, [tensor])

    return functools.wraps(own)(all_reduce)


def _hooked(reducer: Reducer, state: Any, hook: Callable[..., Any]) -> None:
    reducer._hook = (state, hook)


def _hooked_by_name(reducer: Reducer, kind: Any) -> None:
    is_half = kind == distributed.BuiltinCommHookType.FP16_COMPRESS
    reducer._hook = (reducer._group, default_hooks.fp16_compress_hook if is_half else default_hooks.allreduce_hook)
