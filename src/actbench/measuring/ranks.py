"""The processes that measure one case together, one of each rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actbench.errors import MeasurementError
from actbench.measuring.gradients import Gradients
from actbench.measuring.launch import Meeting
from actbench.measuring.released import released_at_once
from actbench.nn.parallel.mesh import DATA, rank_along
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
        take_gpu(meeting.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    os.environ.update(RANK=str(meeting.rank), WORLD_SIZE=str(meeting.size), LOCAL_RANK=str(meeting.local_rank))
    store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=_WAITING, wait_for_workers=False)
    distributed.init_process_group(
        backend,
        store=PrefixStore(meeting.name, store),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=_WAITING,
    )


def take_gpu(local_rank: int) -> None:
    """Let this process compute on the GPU of its number on this machine; a MeasurementError if there are fewer."""
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise MeasurementError(
            f"process {local_rank} of this machine has no GPU: there are {found}; launch as many processes as there "
            "are GPUs"
        )
    torch.cuda.set_device(local_rank)


def is_of_others(error: BaseException) -> bool:
    """Return whether an error is that the process of another rank ended or does not answer."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def are_real(mesh: DeviceMesh | None) -> bool:
    """Return whether several processes measure the case, rather than one that stands for them."""
    return mesh is not None and distributed.get_backend() != "fake"


def settled(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Return what is entered to read the memory of a step in which ranks talk to each other."""
    return released_at_once() if mesh is not None and are_real(mesh) else nullcontext()


def starts(mesh: DeviceMesh | None) -> Callable[[], None]:
    """Return what makes the ranks begin a step together; nothing where there is one."""
    if mesh is None or not are_real(mesh):
        return _nothing
    if mesh.device_type != "cuda":
        return _meet
    one = torch.zeros(1, device="cuda")
    return lambda: _on_the_stream(one)


def _on_the_stream(one: torch.Tensor) -> None:
    """Let the device wait for the others, but not the host, which issues the step meanwhile."""
    distributed.all_reduce(one)


def _meet() -> None:
    """Wait for all others."""
    distributed.barrier()


def _nothing() -> None:
    """Wait for nobody."""


def batch_seed(seed: int, mesh: DeviceMesh | None) -> int:
    """Return the seed of this rank's batch: ranks along ``dp`` have one each, those along ``tp`` share one."""
    return seed + _STRIDE * rank_along(mesh, DATA)


def mean(gradients: Gradients | None, module: nn.Module, mesh: DeviceMesh | None) -> Gradients | None:
    """Return the mean of gradients over the ranks with batches of their own, by name, in host memory.

    That is the gradient of their batches together. Without other ranks the gradients are returned as they are. None is
    what a rank has whose memory was not enough: then all return None.
    """
    if mesh is None or not are_real(mesh):
        return gradients
    if not _have_all(gradients is not None) or gradients is None:
        return None
    found: dict[str, Tensor] = {}
    for name, gradient in _named(gradients, module):
        total = gradient.detach().cpu().clone()
        if DATA in (mesh.mesh_dim_names or ()):
            group = mesh.get_group(DATA)
            distributed.all_reduce(total, group=group)
            total /= group.size()
        found[name] = total
    return found


def whole(gradients: Gradients | None, module: nn.Module, mesh: DeviceMesh | None) -> Gradients | None:
    """Return gradients of which each rank may hold a part as whole ones, by name, in host memory.

    Without other ranks they are returned as they are.
    """
    if gradients is None or not are_real(mesh):
        return gradients
    return {name: _whole(gradient).cpu() for name, gradient in _named(gradients, module)}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _have_all(here: bool) -> bool:
    missing = torch.tensor(0 if here else 1)
    distributed.all_reduce(missing)
    return not missing.item()


def _named(gradients: Gradients, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by the names of their parameters, in an order that all ranks share."""
    for name, parameter in module.named_parameters():
        if parameter in gradients:
            yield name, gradients[parameter]
