"""The axes of the mesh of processes that train together, as schemes and measurements call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA: str = "dp"
"""The axis of a mesh along which processes have batches of their own."""

TENSOR: str = "tp"
"""The axis along which they share the layers of one batch."""


def rank_along(mesh: DeviceMesh | None, axis: str) -> int:
    """Return the number of this process along an axis; 0 where there is no such axis."""
    return 0 if mesh is None or axis not in (mesh.mesh_dim_names or ()) else mesh.get_local_rank(axis)
