"""The processes that measure one case together, one of each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from actbench.errors import MeasurementError
from actbench.launch import Meeting
from actbench.results.records import Case

_WAITING: Final = timedelta(days=7)  # whoever started the processes ends them where one fails or takes too long
_STRIDE: Final = 1_000_003
_LOST: Final = ("gloo", "Connection closed by peer", "Connection reset by peer")


def join(meeting: Meeting, case: Case) -> None:
    """Join the processes that measure a case together, over NCCL on GPUs and gloo elsewhere.

    Raises:
        MeasurementError: This process has no GPU of its own.
    """
    backend = "gloo"
    if case.meter == "cuda":
        _take_gpu(meeting)
        backend = "cpu:gloo,cuda:nccl"
    os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(meeting.size), LOCAL_RANK=str(meeting.local_rank))
    store = distributed.TCPStore(meeting.host, meeting.port, is_master=False, timeout=_WAITING, wait_for_workers=False)
    distributed.init_process_group(
        backend,
        store=distributed.PrefixStore(meeting.name, store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=_WAITING,
    )


def _take_gpu(meeting: Meeting) -> None:
    found = torch.cuda.device_count()
    if meeting.local_rank >= found:
        raise MeasurementError(
            f"process {meeting.local_rank} of this machine has no GPU: there are {found}; launch as many processes as "
            "there are GPUs"
        )
    torch.cuda.set_device(meeting.local_rank)


def is_of_others(error: BaseException) -> bool:
    """Return whether an error is that the process of another rank ended or does not answer."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def starts(mesh: DeviceMesh | None) -> Callable[[], None]:
    """Return what makes the ranks begin a step together; nothing where there is one."""
    if mesh is None or distributed.get_backend() == "fake":
        return _nothing
    if mesh.device_type != "cuda":
        return distributed.barrier
    one = torch.zeros(1, device="cuda")
    return lambda: _on_the_stream(one)


def _on_the_stream(one: torch.Tensor) -> None:
    """Let the device wait for the others, but not the host, which issues the step meanwhile."""
    distributed.all_reduce(one)


def _nothing() -> None:
    """Wait for nobody."""


def batch_seed(seed: int, mesh: DeviceMesh | None) -> int:
    """Return the seed of this rank's batch: ranks along ``dp`` have batches of their own, those along ``tp`` share one."""
    if mesh is None or mesh.mesh_dim_names is None or "dp" not in mesh.mesh_dim_names:
        return seed
    return seed + _STRIDE * mesh.get_local_rank("dp")
