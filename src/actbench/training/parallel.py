"""A model spread over the processes that train it: a copy in each (DDP), or shares of its parameters (FSDP2).

The module of a setup stays what it is, with the names of its parameters; schemes have been applied to it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from actbench.errors import UsageError
from actbench.nn.hooked import HookedForward
from actbench.nn.recomputed import blocks
from actbench.nn.saved import SavedTensors
from actbench.nn.saved.packer import own_tensors
from actbench.setup import TrainingSetup
from actbench.training.processgroup import Team


class Spread:
    """A setup in one process.

    Attributes:
        setup: Its loss runs the model as it is spread.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def average(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""

    def agree(self) -> None:
        """Give all processes the buffers of the first: running statistics are of a process's own share of the data."""

    def part(self) -> None:
        """Let each process hold no more than its share of the parameters, after a pass without a backward one."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor of which this process may hold a share, with those of the others; all must ask for it."""
        return tensor

    def like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Return a whole tensor as another one of its shape is held: this process's share of it, or all."""
        return given


class SharedSpread(Spread):
    """A setup in several processes."""

    def agree(self) -> None:
        """Send the buffers of the first process to the others."""
        for buffer in self.setup.module.buffers():
            distributed.broadcast(buffer, src=0)


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
            _leave_gathered(bound.hooks.packer, units)

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


def _leave_gathered(packer: SavedTensors, units: Sequence[nn.Module]) -> None:
    """Tell what packs saved tensors which of them are parameters that a unit has gathered.

    When the model begins to run, hooks know those parameters only that are there already.
    """

    def leave(unit: nn.Module, _: Any) -> None:
        packer.exclude.add(own_tensors(unit))

    for unit in units:
        unit.register_forward_pre_hook(leave)


class Copies(SharedSpread):
    """A setup of which every process has a copy, with gradients averaged while the backward pass runs."""

    def __init__(self, setup: TrainingSetup) -> None:
        loss = setup.loss
        assert loss is not None
        # Gradients lie where they are averaged, so that there is one copy of them.
        self._parallel = parallel = DistributedDataParallel(setup.module, gradient_as_bucket_view=True)
        super().__init__(replace(setup, loss=lambda _, batch: loss(parallel, batch)))

    def average(self, wanted: bool) -> None:
        """As ``DistributedDataParallel.no_sync`` does."""
        self._parallel.require_backward_grad_sync = wanted


def spread(setup: TrainingSetup, team: Team) -> Spread:
    """Spread a model, whose weights are the same in every process, in place."""
    match team.launch.strategy:
        case "single":
            return Spread(setup)
        case "ddp":
            return Copies(setup)
        case "fsdp2":
            return Shards(setup, team)
