"""Refusing to pack gradients, or to round weights, where several processes share them."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from actbench.errors import ConversionError

_WITHOUT = "leave them out of on=; activations and maps work there"


class NotInParallel:
    """A forward pre-hook that raises where ``DistributedDataParallel`` runs the model.

    Args:
        what: What does not go with it, such as "weights".
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look for the wrapper around the model that runs.

        Raises:
            ConversionError: There is one.
        """
        if distributed.is_available() and DistributedDataParallel._active_ddp_module is not None:
            raise ConversionError(
                f"DistributedDataParallel does not go with {self.what} in a number format: each process would pack its "
                "gradients before they are averaged, and round what it trains otherwise than the others; "
                f"{_WITHOUT}"
            )


def refuse_sharded(module: nn.Module, what: str) -> None:
    """Raise a ConversionError where FSDP has sharded the parameters of a model.

    Args:
        module: The model.
        what: What does not go with it, such as "weights".

    Raises:
        ConversionError: It has.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # imports as much as all of torch

    if any(isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules()):
        raise ConversionError(
            f"FSDP does not go with {what} in a number format: each process holds a shard, which is cut otherwise than "
            f"the blocks of the format, and FSDP reduces gradients by itself; {_WITHOUT}"
        )
