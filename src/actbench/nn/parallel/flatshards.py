"""Shares of optimizer state where every process has a copy of the model (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, distributed, nn, optim

from actbench.optim.shardoptimizer import ShardOptimizer, refuse_whole_matrices


class FlatShards:
    """Of each parameter as many elements in a row, in the order of memory: ``ceil(elements / processes)``.

    A share has as many dimensions as its parameter, all but the last of one element: optimizers tell matrices from
    vectors by them. Parameters must have no gaps in memory (:func:`has_gaps`).

    Args:
        group: The processes.
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
        if gradient.stride() != parameter.stride():
            gradient = gradient.new_empty_strided(parameter.shape, parameter.stride()).copy_(gradient)
        return self._part(gradient)

    def stepped(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give all processes what each has stepped."""
        for parameter in parameters:
            whole, share = _flat(parameter.detach()), self._share(parameter.numel())
            first, count = self._place(parameter)
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
    """Return what makes optimizers that step a share of each parameter, and give it to the other processes.

    They raise a ConversionError, told by ``who``, for an optimizer whose updates need whole parameters.
    """

    def made(module: nn.Module) -> optim.Optimizer:
        optimizer = ShardOptimizer(make, module, FlatShards(group))
        refuse_whole_matrices(optimizer, who)
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
