"""Optimizers of fake parameters that FSDP2 has shared out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from actbench.optim.inbackward import StepInBackward
from actbench.optim.shardoptimizer import ShardOptimizer, by_element


class _LocalShards:
    """The tensors of this process that DTensors are made of."""

    def of(self, parameter: nn.Parameter) -> Tensor:
        return _local(parameter.detach())

    def of_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return None if parameter.grad is None else _local(parameter.grad)

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        pass


def on_local_shards(make: Callable[[nn.Module], optim.Optimizer]) -> Callable[[nn.Module], optim.Optimizer]:
    """Return what makes optimizers that step fake shares as the plain tensors they are.

    What is allocated is the same. The updates of a DTensor are decided on operator by operator, which takes most of the
    time of a simulated step. Real parameters stay DTensors, which torch's distributed checkpoints know; and so do those
    of an optimizer that needs whole matrices, or that steps when FSDP2 has averaged the gradient of a DTensor.
    """

    def made(module: nn.Module) -> optim.Optimizer:
        shared = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        if not shared or not any(isinstance(_local(parameter), FakeTensor) for parameter in module.parameters()):
            return make(module)
        optimizer = ShardOptimizer(make, module, _LocalShards())
        if by_element(optimizer) and not isinstance(optimizer.inner, StepInBackward):
            return optimizer
        return make(module)

    return made


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
