"""Shares of FSDP2 that wait in host memory (torch's ``CPUOffloadPolicy``), on fake tensors too.

A fake CPU tensor stands for one on the meter's device, so torch's own moves between host and device do nothing. Here
they are operators that a meter on fake tensors sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

from actbench.methods.formats.optim.shardoptimizer import ShardOptimizer, Shards
from actbench.ops import hostmemory


def policy(*, offload: bool, parameters: Iterable[Tensor]) -> OffloadPolicy:
    """Return torch's policy; host memory is page-locked for parameters of a CUDA device, which its copies need."""
    return CPUOffloadPolicy(pin_memory=any(each.is_cuda for each in parameters)) if offload else OffloadPolicy()


def place(parts: Iterable[FSDPModule]) -> None:
    """Mark fake shares of units that were made by :func:`policy` as being in host memory, and let them move."""
    for part in parts:
        group = part._get_fsdp_state()._fsdp_param_group
        for share in [] if group is None else group.fsdp_params:
            if hostmemory.is_elsewhere(share._sharded_param_data):
                hostmemory.mark(share._sharded_param_data.untyped_storage())
                share.__class__ = _HostShare


class _HostShare(FSDPParam):
    """Copies a share to the device each time that it is gathered, and its gradient to the host once it is reduced."""

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        if self.sharded_state != ShardedState.SHARDED:
            return super().all_gather_inputs
        on_host = self._sharded_param_data
        self._sharded_param_data = hostmemory.from_host(on_host, self.device)
        try:
            return super().all_gather_inputs
        finally:
            self._sharded_param_data = on_host

    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        is_there = hostmemory.is_host(tensor.untyped_storage())
        return super().to_sharded_dtensor(tensor if is_there else hostmemory.to_host(tensor))


class HostShardOptimizer(ShardOptimizer):
    """Steps shares where they are, in host memory, one after the other, as torch does there."""

    def __init__(self, make: Callable[[nn.Module], optim.Optimizer], module: nn.Module, shards: Shards) -> None:
        super().__init__(make, module, shards)
        for group in self.param_groups:
            if group.get("foreach", False) is None:
                group["foreach"] = False

    def _step(self) -> None:
        with hostmemory.running_on_host():
            super()._step()
