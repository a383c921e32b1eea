"""The flat parameters that FSDP1 makes of a model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParamHandle


def flat_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return what torch's ``FullyShardedDataParallel`` holds of each flat parameter in a model."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # imports as much as all of torch

    found = [part._handle for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
    return [handle for handle in found if handle is not None]  # none for what has no parameters
