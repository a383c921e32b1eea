"""A model that every process has a copy of: averaged gradients (DDP), and optimizer state in shares (ZeRO, stage 1).

Of fake tensors :class:`GradientBuckets` averages the gradients: DistributedDataParallel finds its buckets by tensors of
indices, whose values it has to know. What is allocated is the same, and when: all buckets before the first step, a
gradient that autograd makes until it is copied to its bucket, where it lies from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from actbench.methods.formats.optim.shardoptimizer import ShardOptimizer, refuse_unshared

_bucket_assignment: Any = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
_FIRST_BYTES: Final = 1 << 20
_BYTES: Final = 25 << 20


class ReplicatedModel:
    """A model whose gradients DistributedDataParallel averages or, on fake tensors, code that allocates alike.

    Args:
        module: The model, whose weights are the same in every process.
        group: The processes; None for all of torch's default group.
        bucket_view: Whether gradients lie where they are averaged, so that there is one copy of them.

    Attributes:
        forward: What the loss has to call in place of the model.
        buckets: Tensors that gradients lie in, from step to step, where they are known.
    """

    def __init__(
        self, module: nn.Module, group: distributed.ProcessGroup | None = None, *, bucket_view: bool = True
    ) -> None:
        self.forward: nn.Module = module
        self.buckets: Sequence[Tensor] = ()
        self._parallel: DistributedDataParallel | None = None
        self._buckets: GradientBuckets | None = None
        fake = next((parameter for parameter in module.parameters() if isinstance(parameter, FakeTensor)), None)
        if fake is None:
            self._parallel = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=bucket_view)
            self.forward = self._parallel
            return
        group = group or distributed.group.WORLD
        assert group is not None
        with fake.fake_mode:
            self._buckets = GradientBuckets(module, group, bucket_view=bucket_view)
        self.buckets = self._buckets.buckets

    def average_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""
        if self._buckets is not None:
            self._buckets.average(wanted)
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = wanted


class GradientBuckets:
    """Flat tensors that gradients lie in, each averaged over the processes as soon as its last gradient is made.

    Buckets are filled from the last parameter on, of those that the model names; from the second step on torch's are
    filled in the order in which gradients come, which is much the same.

    Args:
        module: The model; it and its trained parameters get hooks.
        group: The processes.
        bucket_view: Whether gradients stay in the buckets; else they are copied back once they are averaged.

    Attributes:
        buckets: The flat tensors.
    """

    def __init__(self, module: nn.Module, group: distributed.ProcessGroup, *, bucket_view: bool = True) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._group, self._average, self._is_view = group, True, bucket_view
        self._waiting = False  # whether gradients lie outside of the buckets, of passes that did not average
        self.buckets: list[Tensor] = []
        self._views: dict[Tensor, tuple[int, Tensor]] = {}
        self._sizes: list[int] = []
        assigned, _ = _bucket_assignment(list[Tensor](trained), [_FIRST_BYTES, _BYTES])
        for members in assigned:
            self._add([trained[index] for index in members])
        self._missing = list(self._sizes)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(self._give_buffers)

    def average(self, wanted: bool) -> None:
        """Say whether the next backward pass averages gradients over processes."""
        self._average = wanted

    def _add(self, members: Sequence[nn.Parameter]) -> None:
        flat = members[0].new_empty(sum(parameter.numel() for parameter in members), requires_grad=False)
        offset = 0
        for parameter in members:
            # without gaps, in the order of dimensions that the parameter has
            strides = torch.empty_like(parameter, device="meta").stride()
            view = flat.as_strided(parameter.shape, strides, offset)
            self._views[parameter] = (len(self.buckets), view)
            offset += parameter.numel()
        self.buckets.append(flat)
        self._sizes.append(len(members))

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        self._waiting = not self._average
        if self._waiting:
            return
        number, view = self._views[parameter]
        gradient = cast("Tensor", parameter.grad)
        if gradient.untyped_storage() is view.untyped_storage():
            view.div_(self._group.size())
        else:
            torch.mul(gradient, 1 / self._group.size(), out=view)
            if self._is_view:
                parameter.grad = view
        self._missing[number] -= 1
        if self._missing[number]:
            return
        self._missing[number] = self._sizes[number]
        distributed.all_reduce(self.buckets[number], group=self._group)
        for member, (bucket, averaged) in self._views.items() if not self._is_view else ():
            if bucket == number and member.grad is not None:
                member.grad.copy_(averaged)

    @torch.no_grad()
    def _give_buffers(self, module: nn.Module, _: object) -> None:
        """Give all processes the buffers of the first, those of a type as one tensor, before a step's first pass."""
        if self._waiting:
            return
        of_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            of_type.setdefault(buffer.dtype, []).append(buffer)
        for buffers in of_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            distributed.broadcast(flat, src=distributed.get_global_rank(self._group, 0), group=self._group)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


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
