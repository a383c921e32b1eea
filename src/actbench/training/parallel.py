"""A model spread over the processes that train it: a copy in each (DDP), or shares of its parameters (FSDP2).

The module of a setup, to which schemes have been applied before, keeps the names of its parameters.
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
from actbench.training.processgroup import ProcessGroup


class Parallel:
    """A setup in one process; its loss runs the model as it is spread over the processes."""

    def __init__(self, setup: TrainingSetup) -> None:
        self.setup = setup

    def average_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""

    def broadcast_buffers(self) -> None:
        """Give all processes the buffers of the first."""

    def reshard(self) -> None:
        """Free the shares of the others, which a pass without a backward one leaves gathered."""

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor, of which this process may hold a share, as a whole; all processes must call this."""
        return tensor

    def local_like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Return what this process holds of ``given``, a whole tensor, if it is held as ``tensor`` is."""
        return given


class Distributed(Parallel):
    """A setup in several processes, each with a share of the batches and so with running statistics of its own."""

    def broadcast_buffers(self) -> None:
        """Send the buffers of the first process to the others."""
        for buffer in self.setup.module.buffers():
            distributed.broadcast(buffer, src=0)


class Sharded(Distributed):
    """A setup, changed in place, whose parameters are gathered block by block where they are used (FSDP2).

    Raises:
        UsageError: The scheme runs backward passes of its own.
    """

    def __init__(self, setup: TrainingSetup, group: ProcessGroup) -> None:
        super().__init__(setup)
        module, launch = setup.module, group.launch
        bound = HookedForward.of(module)
        if bound is not None and bound.probing is not None:
            raise UsageError(
                "gact finds out how many bits each tensor needs by backward passes of its own, which FSDP2 does not "
                "gather the parameters for: give it auto_prec=false, as gact:L1 does, or train with DDP"
            )
        units = [block for _, block in blocks(module, launch.blocks) if block is not module]
        device = next(module.parameters()).device.type
        mesh = init_device_mesh(device, (group.size,))
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=launch.reshard)
        self._root = fully_shard(module, mesh=mesh)
        if device == "cpu":  # gloo adds up, and averages nothing
            for part in self._parts():
                part.set_force_sum_reduction_for_comms(True)
        if bound is not None:
            _leave_gathered(bound.hooks.packer, units)

    def average_gradients(self, wanted: bool) -> None:
        """As FSDP2 has it."""
        self._root.set_requires_gradient_sync(wanted)

    def reshard(self) -> None:
        """Give back the parameters that others have shares of."""
        for part in self._parts():
            part.reshard()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather the shares of a tensor."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def local_like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Cut this process's share out of a whole tensor."""
        if not isinstance(tensor, DTensor):
            return given
        return distribute_tensor(given.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self.setup.module.modules() if isinstance(part, FSDPModule)]


def _leave_gathered(packer: SavedTensors, units: Sequence[nn.Module]) -> None:
    """Let ``packer`` leave out the parameters that FSDP2 has gathered for a unit.

    When the model begins to run, hooks know only the parameters that are there already.
    """

    def leave(unit: nn.Module, _: Any) -> None:
        packer.exclude.add(own_tensors(unit))

    for unit in units:
        unit.register_forward_pre_hook(leave)


class Replicated(Distributed):
    """A setup of which every process has a copy; gradients are averaged while the backward pass runs (DDP)."""

    def __init__(self, setup: TrainingSetup) -> None:
        loss = setup.loss
        assert loss is not None
        # Gradients lie where they are averaged, so that there is one copy of them.
        self._parallel = parallel = DistributedDataParallel(setup.module, gradient_as_bucket_view=True)
        super().__init__(replace(setup, loss=lambda _, batch: loss(parallel, batch)))

    def average_gradients(self, wanted: bool) -> None:
        """As ``DistributedDataParallel.no_sync`` does."""
        self._parallel.require_backward_grad_sync = wanted


def parallelize(setup: TrainingSetup, group: ProcessGroup) -> Parallel:
    """Spread a model, whose weights are the same in every process, in place."""
    match group.launch.strategy:
        case "single":
            return Parallel(setup)
        case "ddp":
            return Replicated(setup)
        case "fsdp2":
            return Sharded(setup, group)
