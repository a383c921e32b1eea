"""The gradients of a model that every process has a copy of, in the buckets of torch's DistributedDataParallel.

For fake tensors alone: DistributedDataParallel finds its buckets by tensors of indices, and what these hold it has to
know. What is allocated here is the same, and when: all buckets before the first step, a gradient that autograd makes
until it is copied to its bucket, where it lies from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, distributed, nn

_bucket_assignment: Any = distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
_FIRST_BYTES: Final = 1 << 20
_BYTES: Final = 25 << 20


class GradientBuckets:
    """Flat tensors that gradients lie in, each averaged over the processes as soon as its last gradient is made.

    Buckets are filled from the last parameter on, of those that the model names; from the second step on torch's are
    filled in the order in which gradients come, which is much the same.

    Args:
        module: Whose trained parameters get hooks.
        group: The processes.

    Attributes:
        buckets: The flat tensors.
        waiting: Whether there are gradients outside of the buckets, of passes that did not average.
    """

    def __init__(self, module: nn.Module, group: distributed.ProcessGroup) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._group, self._average, self._missing = group, True, list[int]()
        self.buckets: list[Tensor] = []
        self.waiting = False
        self._views: dict[Tensor, tuple[int, Tensor]] = {}
        self._sizes: list[int] = []
        assigned, _ = _bucket_assignment(list[Tensor](trained), [_FIRST_BYTES, _BYTES])
        for members in assigned:
            self._add([trained[index] for index in members])
        self._missing = list(self._sizes)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def average(self, wanted: bool) -> None:
        """Say whether the next backward pass averages gradients over processes."""
        self._average = wanted

    def _add(self, members: Sequence[nn.Parameter]) -> None:
        flat = members[0].new_empty(sum(parameter.numel() for parameter in members), requires_grad=False)
        offset = 0
        for parameter in members:
            view = flat.as_strided(parameter.shape, _dense_strides(parameter), offset)
            self._views[parameter] = (len(self.buckets), view)
            offset += parameter.numel()
        self.buckets.append(flat)
        self._sizes.append(len(members))

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        self.waiting = not self._average
        if self.waiting:
            return  # and the gradient waits outside of its bucket
        number, view = self._views[parameter]
        gradient = cast("Tensor", parameter.grad)
        if gradient.untyped_storage() is view.untyped_storage():
            view.div_(self._group.size())
        else:
            torch.mul(gradient, 1 / self._group.size(), out=view)
            parameter.grad = view
        self._missing[number] -= 1
        if not self._missing[number]:
            self._missing[number] = self._sizes[number]
            distributed.all_reduce(self.buckets[number], group=self._group)


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor in memory without gaps, in the order of dimensions that it has."""
    return torch.empty_like(parameter, device="meta").stride()
