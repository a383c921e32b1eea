"""The mesh of processes that train together: its axes, as schemes and measurements call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actbench.errors import ConversionError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

DATA: str = "dp"
"""The axis of a mesh along which processes have batches of their own."""

TENSOR: str = "tp"
"""The axis along which they share the layers of one batch."""


def rank_along(mesh: DeviceMesh | None, axis: str) -> int:
    """Return the number of this process along an axis; 0 where there is no such axis."""
    return 0 if mesh is None or axis not in (mesh.mesh_dim_names or ()) else mesh.get_local_rank(axis)


def mesh_along(axis: str, mesh: DeviceMesh | None, module: nn.Module, ranks: int, who: str) -> DeviceMesh:
    """Return the ``ranks`` processes along an axis, as a mesh of that axis alone.

    Args:
        axis: ``DATA`` or ``TENSOR``.
        mesh: The processes of a setup, with such an axis; None for those of torch's default process group.
        module: The model; the mesh is of its device.
        ranks: Number of processes that must be there.
        who: The specification of the scheme that asks, for messages.

    Raises:
        ConversionError: There are not ``ranks`` processes.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if mesh is None:
        found = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 0
        if found != ranks:
            there = f"torch's process group has {found}" if found else "this process belongs to no process group"
            raise ConversionError(
                f"{who} spreads the model over {ranks} processes, and {there}: start {ranks} processes by 'torchrun "
                f"--nproc-per-node {ranks} …', and call torch.distributed.init_process_group() first; or simulate one "
                "process by 'actbench measure --meter simulated'"
            )
        return init_device_mesh(next(module.parameters()).device.type, (ranks,), mesh_dim_names=(axis,))
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ConversionError(f"{who} needs a mesh with an axis {axis!r}; the setup's mesh has {', '.join(names)}")
    along = mesh[axis]
    if along.size() != ranks:
        raise ConversionError(f"{who} needs {ranks} processes along the mesh's axis {axis!r}, which has {along.size()}")
    return along
