"""A model that every process has a copy of, whose gradients are averaged in the backward pass (DDP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from actbench.nn.parallel.buckets import GradientBuckets


class ReplicatedModel:
    """A model and what averages its gradients: DistributedDataParallel, or what allocates as it does on fake tensors.

    Args:
        module: The model, whose weights are the same in every process.
        group: The processes; None for all of torch's default group.

    Attributes:
        forward: What the loss has to call in place of the model.
        buckets: Tensors that gradients lie in, from step to step, where they are known.
    """

    def __init__(self, module: nn.Module, group: distributed.ProcessGroup | None = None) -> None:
        self.forward: nn.Module = module
        self.buckets: Sequence[Tensor] = ()
        self._parallel: DistributedDataParallel | None = None
        self._buckets: GradientBuckets | None = None
        fake = next((parameter for parameter in module.parameters() if isinstance(parameter, FakeTensor)), None)
        if fake is None:
            # Gradients lie where they are averaged, so that there is one copy of them.
            self._parallel = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
            self.forward = self._parallel
            return
        group = group or distributed.group.WORLD
        assert group is not None
        with fake.fake_mode:
            self._buckets = GradientBuckets(module, group)
        self.buckets = self._buckets.buckets
        module.register_forward_pre_hook(_SameBuffers(group, self._buckets))

    def average_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""
        if self._buckets is not None:
            self._buckets.average(wanted)
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = wanted


class _SameBuffers:
    """A forward pre-hook that gives all processes the buffers of the first, as DistributedDataParallel does.

    Once a step, before its first pass: not while gradients wait for those of other passes.
    """

    def __init__(self, group: distributed.ProcessGroup, gradients: GradientBuckets) -> None:
        self._group, self._gradients = group, gradients

    def __call__(self, module: nn.Module, args: object) -> None:
        """Broadcast the buffers of each type as one tensor."""
        if self._gradients.waiting:
            return
        of_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            of_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in of_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                distributed.broadcast(flat, src=distributed.get_global_rank(self._group, 0), group=self._group)
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))
