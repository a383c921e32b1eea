"""A model that every process has a copy of: averaged gradients (DDP), and optimizer state in shares (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, distributed, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from actbench.device.patches import Patches
from actbench.device.reducer import Reducer, reduce_fakes
from actbench.device.works import Works
from actbench.methods.formats.optim.shardoptimizer import ShardOptimizer, refuse_unshared


class ReplicatedModel:
    """A model whose gradients DistributedDataParallel averages; those of fake tensors by a reducer of ours.

    Args:
        module: The model, whose weights are the same in every process.
        group: The processes; None for all of torch's default group.
        bucket_view: Whether gradients lie where they are averaged, so that there is one copy of them.

    Attributes:
        forward: What the loss has to call in place of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        group: distributed.ProcessGroup | None = None,
        *,
        bucket_view: bool = True,
        find_unused: bool = False,
    ) -> None:
        fake = next((parameter for parameter in module.parameters() if isinstance(parameter, FakeTensor)), None)
        with Patches() as patches:
            if fake is not None:
                reduce_fakes(patches, Works())
                patches.enter_context(fake.fake_mode)
            self.forward = DistributedDataParallel(
                module,
                process_group=group,
                gradient_as_bucket_view=bucket_view,
                find_unused_parameters=find_unused,
            )
            reducer: Any = self.forward.reducer
            if fake is not None:
                reducer.settle()  # the first step that is simulated is one of many

    def average_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""
        # no_sync() of DistributedDataParallel sets it for a block
        self.forward.require_backward_grad_sync = wanted

    def buffers(self) -> Sequence[Tensor]:
        """Return the tensors that gradients lie in, from step to step, where they are known."""
        reducer: Any = self.forward.reducer
        return reducer.buffers if isinstance(reducer, Reducer) else ()


class FlatShards:
    """The shares of each parameter: ``ceil(elements / processes)`` consecutive elements, in the order of memory.

    A share has as many dimensions as its parameter, all but the last of one element: optimizers tell matrices from
    vectors by them. Parameters must have no gaps in memory (:func:`has_gaps`).
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the elements of a parameter that this process steps."""
        return self._part(parameter.detach())

    def of_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of these elements."""
        gradient = parameter.grad
        if gradient is None:
            return None
        # shares are cut in the order of memory, which has to be one for parameter, gradient and state
        if gradient.stride() != parameter.stride():
            gradient = gradient.new_empty_strided(parameter.shape, parameter.stride()).copy_(gradient)
        return self._part(gradient)

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give all processes what each has stepped."""
        for parameter in parameters:
            whole, share = _flat(parameter.detach()), self._share(parameter.numel())
            first, count = self._place(parameter)
            # equal shares are gathered straight into the parameter, without a second tensor
            if share * self._group.size() == whole.numel():
                distributed.all_gather_into_tensor(whole, whole[first : first + count], group=self._group)
                continue
            padded = whole.new_empty(share)
            padded[:count].copy_(whole[first : first + count])
            gathered = whole.new_empty(share * self._group.size())
            distributed.all_gather_into_tensor(gathered, padded, group=self._group)
            whole.copy_(gathered[: whole.numel()])

    def _part(self, tensor: Tensor) -> Tensor:
        first, count = self._place(tensor)
        return _flat(tensor)[first : first + count].view(*(1,) * (tensor.dim() - 1), count)

    def _share(self, elements: int) -> int:
        return -(-elements // self._group.size())

    def _place(self, parameter: Tensor) -> tuple[int, int]:
        """Return the first element of this process, and how many it has: none where those before it have all."""
        share = self._share(parameter.numel())
        first = min(share * distributed.get_rank(self._group), parameter.numel())
        return first, min(share, parameter.numel() - first)


def on_flat_shards(
    make: Callable[[nn.Module], optim.Optimizer], group: distributed.ProcessGroup, who: str
) -> Callable[[nn.Module], optim.Optimizer]:
    """Return a function that makes optimizers which step a share of each parameter and send it to other processes.

    They raise a ConversionError, told by ``who``, for an optimizer that needs whole parameters.
    """

    def made(module: nn.Module) -> optim.Optimizer:
        optimizer = ShardOptimizer(make, module, FlatShards(group))
        refuse_unshared(optimizer, who)
        return optimizer

    return made


def has_gaps(tensor: Tensor) -> bool:
    """Return whether memory between a tensor's first and last element is not its own, or elements share memory."""
    place = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != place:
            return tensor.numel() > 0
        place *= size
    return False


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps in the order of memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
