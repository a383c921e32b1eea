"""A model whose parameters, gradients and optimizer state are shared out over processes: FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from actbench.errors import UsageError
from actbench.learning.spreading import SharedSpread
from actbench.learning.team import Team
from actbench.nn.hooked import HookedForward
from actbench.nn.keeping import Keeper
from actbench.nn.offloaded import own_tensors
from actbench.nn.recomputed import blocks
from actbench.training import TrainingSetup


class Shards(SharedSpread):
    """A setup whose parameters are gathered block by block where they are used.

    Args:
        setup: Changed in place.
        team: Says which classes of modules are blocks, and whether what was gathered is given back after forward.

    Raises:
        UsageError: The scheme runs backward passes of its own.
    """

    def __init__(self, setup: TrainingSetup, team: Team) -> None:
        super().__init__(setup)
        module, launch = setup.module, team.launch
        bound = HookedForward.of(module)
        if bound is not None and bound.probing is not None:
            raise UsageError(
                "gact finds out how many bits each tensor needs by backward passes of its own, which FSDP2 does not "
                "gather the parameters for: give it auto_prec=false, as gact:L1 does, or train with DDP"
            )
        units = [block for _, block in blocks(module, launch.blocks) if block is not module]
        device = next(module.parameters()).device.type
        mesh = init_device_mesh(device, (team.size,))
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=launch.reshard)
        self._root = fully_shard(module, mesh=mesh)
        if device == "cpu":  # gloo adds up, and averages nothing
            for part in self._parts():
                part.set_force_sum_reduction_for_comms(True)
        if bound is not None:
            _leave_gathered(bound.hooks.keeper, units)

    def average(self, wanted: bool) -> None:
        """As FSDP2 has it."""
        self._root.set_requires_gradient_sync(wanted)

    def part(self) -> None:
        """Give back the parameters that others have shares of."""
        for part in self._parts():
            part.reshard()

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather the shares of a tensor."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Cut this process's share out of a whole tensor."""
        if not isinstance(tensor, DTensor):
            return given
        return distribute_tensor(given.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.setup.module.modules() if isinstance(part, FSDPModule)]


def _leave_gathered(keeper: Keeper, units: Sequence[nn.Module]) -> None:
    """Tell what packs saved tensors which of them are parameters that a unit has gathered.

    When the model begins to run, hooks know those parameters only that are there already.
    """

    def leave(unit: nn.Module, _: Any) -> None:
        keeper.leave(own_tensors(unit))

    for unit in units:
        unit.register_forward_pre_hook(leave)
