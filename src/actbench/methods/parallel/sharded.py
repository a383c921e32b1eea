"""A model whose parameters are sharded over processes, and gathered unit by unit where they are used (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, distributed, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from actbench.errors import ConversionError
from actbench.methods.formats.optim.shardoptimizer import ShardOptimizer, by_element
from actbench.packing import SavedTensors
from actbench.packing.hooked import HookedForward
from actbench.packing.packer import own_tensors
from actbench.scheme.wrapped import StepsInBackward
from actbench.simulator.fake import mode_of


class ShardedModel:
    """A model, changed in place, whose parameters are shared out by torch's ``fully_shard``.

    Each unit is gathered as a whole before it runs forward and backward; what is in no unit is gathered with the model
    itself, and stays so until the end of its backward pass.

    Args:
        module: The model; all schemes but those of the optimizer were applied before.
        units: Modules inside it, the blocks.
        mesh: The processes.
        reshard: Whether a unit's shares of other processes are freed after its forward pass; a number keeps shares of
            that many processes.
        policy: In which types parameters are gathered and gradients reduced.
        cpu_offload: Whether shares of parameters and gradients are in host memory.

    Raises:
        ConversionError: Hooks run backward passes of their own, or torch cannot share out a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        reshard: bool | int = True,
        policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
    ) -> None:
        refuse_probing(module, "FSDP2")
        bound = HookedForward.of(module)
        policy = policy or MixedPrecisionPolicy()
        pinned = any(parameter.is_cuda for parameter in module.parameters())  # copies of a card need it
        placed = CPUOffloadPolicy(pin_memory=pinned) if cpu_offload else OffloadPolicy()
        units = [unit for unit in units if unit is not module]
        try:
            with mode_of(module) or nullcontext():  # what it makes beside shares of fake parameters is fake, too
                # blocks first: fully_shard of the model takes what is in no unit yet
                for unit in units:
                    fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=placed)
                self.root: FSDPModule = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=placed)
        except (NotImplementedError, ValueError) as error:
            raise ConversionError(f"FSDP2 cannot share out parameters of {type(module).__name__}: {error}") from error
        self._module = module
        if distributed.get_backend(mesh.get_group()) == "gloo":  # adds up, and averages nothing
            for part in self._parts():
                part.set_force_sum_reduction_for_comms(True)
        if bound is not None:
            leave_gathered(bound.hooks.packer, units)

    def reduce_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass reduces gradients, or adds whole ones to those of this process."""
        self.root.set_requires_gradient_sync(wanted)

    def reshard(self) -> None:
        """Free the shares of other processes, which a forward pass without a backward pass leaves gathered."""
        for part in self._parts():
            part.reshard()

    def _parts(self) -> list[FSDPModule]:
        return [part for part in self._module.modules() if isinstance(part, FSDPModule)]


def refuse_probing(module: nn.Module, what: str) -> None:
    """Raise a ConversionError for hooks that run backward passes of their own, before ``what`` gathers anything."""
    bound = HookedForward.of(module)
    if bound is not None and bound.probing is not None:
        raise ConversionError(
            f"gact finds out how many bits each tensor needs by backward passes of its own, which {what} does not "
            "gather the parameters for: give it auto_prec=false, as gact:L1 does, or take DDP"
        )


def leave_gathered(packer: SavedTensors, units: Sequence[nn.Module]) -> None:
    """Let ``packer`` leave out the parameters that are gathered for a unit.

    When the model begins to run, hooks know only the parameters that are there already.
    """

    def leave(unit: nn.Module, _: Any) -> None:
        packer.exclude.add(own_tensors(unit))

    for unit in units:
        unit.register_forward_pre_hook(leave)


class _LocalShards:
    """The tensors of this process that DTensors are made of."""

    def of(self, parameter: nn.Parameter) -> Tensor:
        return _local(parameter.detach())

    def of_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return None if parameter.grad is None else _local(parameter.grad)

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        pass


def on_local_shards(
    make: Callable[[nn.Module], optim.Optimizer], *, on_host: bool = False
) -> Callable[[nn.Module], optim.Optimizer]:
    """Return a function that makes optimizers which step fake shares as the plain tensors they are.

    What is allocated is the same. The updates of a DTensor are decided on operator by operator, which takes most of the
    time of a simulated step. Real parameters stay DTensors, which torch's distributed checkpoints know; and so do those
    of an optimizer that needs whole matrices, or that steps when FSDP2 has averaged the gradient of a DTensor.
    ``on_host`` refuses these two, with a ConversionError: the shares are in host memory.
    """

    def made(module: nn.Module) -> optim.Optimizer:
        shared = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        if not shared or not any(isinstance(_local(parameter), FakeTensor) for parameter in module.parameters()):
            return make(module)
        optimizer = ShardOptimizer(make, module, _LocalShards())
        if by_element(optimizer) and not isinstance(optimizer.inner, StepsInBackward):
            return optimizer
        if on_host:
            name = type(optimizer.inner).__name__
            raise ConversionError(f"cpu_offload=true: {name} is not simulated on shares in host memory; take adamw")
        return make(module)

    return made


def _local(tensor: Tensor) -> Tensor:
    # to_local() would run an autograd function
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
