"""The processes that a scheme spreads a model over: real ones, or those of a simulation, of which this is the first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actbench.errors import MeasurementError
from actbench.measuring.meters import Meter
from actbench.nn.parallel.mesh import DATA, TENSOR
from actbench.schemes.base import Scheme

_AXES: Final = (DATA, TENSOR)
"""From the outside in: the processes of one tensor-parallel group follow one another, on one machine."""


def mesh(scheme: Scheme, meter: Meter) -> DeviceMesh | None:
    """Return the processes that a scheme needs as a mesh, or None where it needs one alone.

    For a simulated meter they are those of torch's fake process group, in which collectives move nothing.

    Raises:
        MeasurementError: This process does not belong to a group of as many.
    """
    axes = scheme.mesh_axes
    if not axes:
        return None
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
