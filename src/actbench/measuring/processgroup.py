"""The process group of a case, as one of its processes sees it.

A process that measures alone is :data:`ALONE`; in a simulation it stands for rank 0. Several real processes are :class:`actbench.measuring.ranks.Ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actbench.errors import MeasurementError
from actbench.measuring.meters import Meter
from actbench.measuring.meters.meter import at_once
from actbench.scheme.base import Scheme
from actbench.scheme.facets import Spread
from actbench.scheme.mesh import DATA, TENSOR, rank_along

_AXES: Final = (DATA, TENSOR)
"""From the outside in: the processes of one tensor-parallel group follow one another, on one machine."""

_STRIDE: Final = 1_000_003


class ProcessGroup:
    """A group of one process; subclasses have several.

    Attributes:
        size: How many processes measure the case.
        are_real: Whether several measure it, rather than one that stands for them.
    """

    size = 1
    are_real = False

    def mesh(self, scheme: Scheme, meter: Meter) -> DeviceMesh | None:
        """Return the processes that a scheme needs as a mesh, or None where it needs one alone.

        For a simulated meter they are those of torch's fake process group, in which collectives move nothing.

        Raises:
            MeasurementError: There are not as many.
        """
        spread = scheme.facet(Spread)
        if spread is None:
            return None
        axes = spread.axes
        names = tuple(name for name in _AXES if name in axes)
        sizes = tuple(axes[name] for name in names)
        wanted = math.prod(sizes)
        if not meter.materialize:
            _pretend(scheme, wanted)
        elif wanted != self.size or not self.are_real:
            found = "is 1" if self.size == 1 else f"are {self.size}"
            raise MeasurementError(
                f"scheme {scheme.spec!r} spreads the model over {wanted} processes, and there {found}: start "
                f"'torchrun --nproc-per-node {wanted} -m actbench …', or take --meter simulated, which needs one"
            )
        return init_device_mesh(meter.device.type, sizes, mesh_dim_names=names)

    def sync_allocations(self) -> AbstractContextManager[None]:
        """Return a context in which collectives release their memory before the next operator allocates."""
        return nullcontext()

    def starts(self, mesh: DeviceMesh | None) -> Callable[[], object]:
        """Return a function that makes all processes begin a step together."""
        return at_once

    def mean(
        self, gradients: Mapping[Any, Tensor] | None, module: nn.Module, mesh: DeviceMesh | None
    ) -> Mapping[Any, Tensor] | None:
        """Return the mean of gradients over the processes with batches of their own: here, as they are.

        That is the gradient of their batches together. A process that ran out of memory gives None, and then all return
        None.
        """
        return gradients

    def whole(self, gradients: Mapping[Any, Tensor] | None, module: nn.Module) -> Mapping[Any, Tensor] | None:
        """Return whole gradients where each process may hold a part: here, the gradients as they are."""
        return gradients


ALONE: Final = ProcessGroup()
"""This process alone."""


def batch_seed(seed: int, mesh: DeviceMesh | None) -> int:
    """Return the seed of this process's batch: processes along ``dp`` have one each, those along ``tp`` share one."""
    return seed + _STRIDE * rank_along(mesh, DATA)


@contextmanager
def leave_fake_group() -> Iterator[None]:
    """Leave the fake group at the end of the block, so that this process may join a real one."""
    try:
        yield
    finally:
        if distributed.is_initialized() and distributed.get_backend() == "fake":
            distributed.destroy_process_group()


def take_gpu(local_rank: int) -> None:
    """Let this process compute on the GPU of its number on this machine; a MeasurementError if there are fewer."""
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise MeasurementError(
            f"process {local_rank} of this machine has no GPU: there are {found}; launch as many processes as there "
            "are GPUs"
        )
    torch.cuda.set_device(local_rank)


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
