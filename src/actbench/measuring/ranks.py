"""The processes that measure one case together, one of each rank; in a simulation this is the first of them."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actbench.errors import MeasurementError
from actbench.measuring.launch import Meeting
from actbench.measuring.meters import Meter
from actbench.measuring.meters.base import at_once
from actbench.nn.parallel.mesh import DATA, TENSOR, rank_along
from actbench.results.records import Case
from actbench.schemes.base import Scheme
from actbench.schemes.facets import Spread

_AXES: Final = (DATA, TENSOR)
"""From the outside in: the processes of one tensor-parallel group follow one another, on one machine."""

_WAITING: Final = timedelta(days=7)  # whoever started the processes ends them where one fails or takes too long
_STRIDE: Final = 1_000_003
_LOST: Final = ("gloo", "Connection closed by peer", "Connection reset by peer")
_COLLECTIVES: Final = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_THREAD: Final = "pt_gloo_runloop"
_TASKS: Final = Path("/proc/self/task")
_MOST_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 1e-4


def mesh(scheme: Scheme, meter: Meter) -> DeviceMesh | None:
    """Return the processes that a scheme needs as a mesh, or None where it needs one alone.

    For a simulated meter they are those of torch's fake process group, in which collectives move nothing.

    Raises:
        MeasurementError: This process does not belong to a group of as many.
    """
    spread = scheme.facet(Spread)
    if spread is None:
        return None
    axes = spread.axes
    names = tuple(name for name in _AXES if name in axes)
    sizes = tuple(axes[name] for name in names)
    wanted = math.prod(sizes)
    if meter.materialize:
        _check(scheme, wanted)
    else:
        _pretend(scheme, wanted)
    device = "cuda" if meter.name == "cuda" else "cpu"  # simulated tensors are those of a CPU
    return init_device_mesh(device, sizes, mesh_dim_names=names)


@contextmanager
def left_after() -> Iterator[None]:
    """Leave the group of a simulation at the end of the block, so that this process may join a real one."""
    try:
        yield
    finally:
        if distributed.is_initialized() and distributed.get_backend() == "fake":
            distributed.destroy_process_group()


def _check(scheme: Scheme, wanted: int) -> None:
    found = distributed.get_world_size() if distributed.is_initialized() else 1
    if found != wanted or not distributed.is_initialized():
        raise MeasurementError(
            f"scheme {scheme.spec!r} spreads the model over {wanted} processes, and there is {found}: start "
            f"'torchrun --nproc-per-node {wanted} -m actbench …', or take --meter simulated, which needs one"
        )


def _pretend(scheme: Scheme, wanted: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if distributed.is_initialized():
        if distributed.get_backend() != "fake":
            raise MeasurementError(
                f"scheme {scheme.spec!r} cannot be simulated in a process that belongs to a real process group "
                f"({distributed.get_backend()}): simulate it in a process of its own"
            )
        distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=0, world_size=wanted, store=FakeStore())


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
        backend, store=PrefixStore(meeting.name, store), rank=meeting.rank, world_size=meeting.size, timeout=_WAITING
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


def starts(mesh: DeviceMesh | None) -> Callable[[], object]:
    """Return what makes the ranks begin a step together; nothing where there is one."""
    if mesh is None or not are_real(mesh):
        return at_once
    if mesh.device_type != "cuda":
        return distributed.barrier
    one = torch.zeros(1, device="cuda")
    return lambda: distributed.all_reduce(one)  # the device waits for the others, the host does not


def batch_seed(seed: int, mesh: DeviceMesh | None) -> int:
    """Return the seed of this rank's batch: ranks along ``dp`` have one each, those along ``tp`` share one."""
    return seed + _STRIDE * rank_along(mesh, DATA)


@contextmanager
def released_at_once() -> Iterator[None]:
    """Let torch's collectives inside the block be the last to hold what gloo's threads worked on.

    Such a thread holds the tensors of a collective, and the copies that gloo makes of them, a moment longer than the
    caller. Then they are freed in a thread that no profiler watches, and would count as alive for ever. Of a collective
    that is asynchronous nothing is known.
    """
    with ExitStack() as patched:
        for name in _COLLECTIVES:
            if hasattr(distributed, name):
                waiting = _waiting(getattr(distributed, name))
                patched.enter_context(mock.patch.object(distributed, name, waiting))
        functional = torch.ops._c10d_functional
        waited = _waited(functional.wait_tensor)
        patched.enter_context(mock.patch.object(functional, "wait_tensor", waited))
        yield


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = collective(*args, async_op=True, **kwargs)
        if async_op or work is None:
            return work
        work.wait()
        _wait_for_threads()
        return None  # and here the work is given up, when only this thread has it

    return call


def _waited(wait: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what waits for the result of a functional collective, which it returns."""

    def call(result: Tensor) -> Tensor:
        result = wait(result)
        _wait_for_threads()
        return result

    return call


def _wait_for_threads() -> None:
    """Wait until all threads of gloo's have gone back to waiting for work; Linux says it of each thread."""
    deadline = time.monotonic() + _MOST_SECONDS
    while any(_state(task) == "R" for task in _TASKS.glob("*")) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _state(task: Path) -> str:
    """Return the letter of what a thread of gloo's does; nothing for other threads, and for one that has ended."""
    try:
        _, _, rest = (task / "stat").read_text().partition(f"({_THREAD}")
    except OSError:
        return ""
    return rest.partition(")")[2].strip()[:1]
