"""How the processes of a script share its models, as its parameters tell."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from actbench.model.measured import Mesh


def mesh(processes: int, tensor_parallel: int) -> Mesh | None:
    """Return the processes along each axis; None for one alone."""
    if processes == 1:
        return None
    shared = tensor_parallel if processes % tensor_parallel == 0 else 1
    return Mesh(dp=processes // shared, tp=shared)


def tensor_parallel(models: Iterable[nn.Module]) -> int:
    """Return how many processes share the layers of one batch in the most shared of the models' parameters."""
    if "torch.distributed.tensor" not in sys.modules:
        return 1
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    most = 1
    for model in models:
        is_sharded = any(isinstance(part, FSDPModule) for part in model.modules())
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                most = max(most, _processes_of_layer(parameter, is_sharded=is_sharded))
    return most


def _processes_of_layer(parameter: Any, *, is_sharded: bool) -> int:
    """Return how many processes share a DTensor's layer: FSDP2 has the outer dimensions of its mesh for itself."""
    placements, sizes = parameter.placements, parameter.device_mesh.shape
    if is_sharded:
        first = 2 if len(sizes) > 1 and placements[0].is_replicate() else 1  # copies of what is sharded, or not
        placements, sizes = placements[first:], sizes[first:]
    found = 1
    for placement, size in zip(placements, sizes, strict=True):
        found *= 1 if placement.is_replicate() else size
    return found
