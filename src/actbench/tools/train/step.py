"""One step of a training run, on a model that may be spread over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from actbench.errors import ModelError, UntraceableError, UsageError, boundary
from actbench.measuring.inspection import refuse_idle, trace
from actbench.measuring.meters import Meter
from actbench.methods.parallel.replicated import ReplicatedModel
from actbench.methods.parallel.sharded import ShardedModel
from actbench.packing.blocks import blocks
from actbench.packing.samplegradients import samples
from actbench.scheme.microbatches import Batch, MicroBatch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.scheme.wrapped import HoldsGradients, StepsInBackward
from actbench.tools.train.processes import ProcessGroup
from actbench.tools.train.records import TrainingCase


class Parallel:
    """A setup as it is spread over processes, changed in place: alone, as copies (DDP), or as shares (FSDP2).

    Its loss runs the model so, and its module, to which schemes have been applied before, keeps the names of its
    parameters, which FSDP2 gathers block by block where they are used.

    Raises:
        ConversionError: The scheme runs backward passes of its own, and FSDP2 is asked for.
    """

    def __init__(self, setup: TrainingSetup, group: ProcessGroup) -> None:
        self.setup, launch = setup, group.launch
        self._copies: ReplicatedModel | None = None
        self._shares: ShardedModel | None = None
        if launch.strategy == "ddp":
            loss, copies = setup.loss, ReplicatedModel(setup.module)
            assert loss is not None
            self._copies, self.setup = copies, replace(setup, loss=lambda _, batch: loss(copies.forward, batch))
        if launch.strategy == "fsdp2":
            units = [block for _, block in blocks(setup.module, launch.blocks)]
            mesh = init_device_mesh(next(setup.module.parameters()).device.type, (group.size,))
            self._shares = ShardedModel(setup.module, units, mesh, reshard=launch.reshard)

    def average_gradients(self, wanted: bool) -> None:
        """Say whether the next backward pass averages the gradients, or adds to those of this process alone."""
        if self._copies:
            self._copies.average_gradients(wanted)
        if self._shares:
            self._shares.reduce_gradients(wanted)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give all processes the running statistics of the first, and free gathered parameters after the block."""
        if self._copies or self._shares:
            for buffer in self.setup.module.buffers():
                distributed.broadcast(buffer, src=0)
        yield
        if self._shares:
            self._shares.reshard()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor, if this process holds a share; all processes must call this."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def is_own(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the optimizer's state may differ in each process, and is no known share."""
        return self._shares is not None and tensor.dim() > 0 and not isinstance(tensor, DTensor)

    def local_like(self, tensor: Tensor, given: Tensor) -> Tensor:
        """Return what this process holds of ``given``, a whole tensor, if it is held as ``tensor`` is."""
        if not isinstance(tensor, DTensor):
            return given
        return distribute_tensor(given.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def rate_factor(case: TrainingCase, step: int, steps: int) -> float:
    """Return what multiplies the learning rate of a step: of the step alone, so that resuming restores nothing."""
    if step < case.warmup_steps:
        return (step + 1) / (case.warmup_steps + 1)
    done = step / steps
    match case.schedule:
        case "constant":
            return 1.0
        case "cosine":
            past = (step - case.warmup_steps) / max(1, steps - case.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * past))
        case "multi_step":
            return math.prod(case.gamma for milestone in case.milestones if done >= milestone)


def check_acts(setup: TrainingSetup, meter: Meter, batch: Batch) -> tuple[str, ...]:
    """Run one forward pass on fake tensors, and refuse a scheme if a part of it does nothing there.

    Returns:
        A warning where that is unknown, since the model does not run on fake tensors.

    Raises:
        ConversionError: Nothing that a part converted runs.
        IdleError: It runs, and changes nothing of what the step saves.
    """
    try:
        with meter.operators(), boundary("it cannot be run on fake tensors", UntraceableError):
            seen = trace(setup, lambda: {name: tree_map(_fake, value) for name, value in batch.items()})
    except (UntraceableError, ModelError) as error:  # what is wrong with the model is for a real step to say
        return (f"whether each part of the scheme acts is unknown: {error}",)
    refuse_idle(setup.parts, seen)
    return ()


def _fake(value: Any) -> Any:
    mode = active_fake_mode()
    return mode.from_tensor(value) if isinstance(value, Tensor) and mode is not None else value


class LearningStep(TrainStep):
    """A step of a training run, whose gradients are averaged over the processes, scaled and clipped.

    ``chosen`` are the samples of the data set in ``batch``, int64 (rows,); the two change together. The scaler
    multiplies the loss in float16, where small gradients would be zero, and leaves out steps whose gradients are no
    numbers (Micikevicius et al. 2018, arXiv 1710.03740); elsewhere it does nothing.

    Raises:
        UsageError: The scheme holds gradients in a form of its own, and the case asks to clip or to scale them.
    """

    def __init__(self, parallel: Parallel, case: TrainingCase, batch: Batch, chosen: Tensor) -> None:
        super().__init__(parallel.setup, batch)
        self.chosen = chosen
        self.rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.parallel, self._longest = parallel, case.max_grad_norm
        in_float16 = self.setup.precision.autocast is torch.float16
        _check(case, self.optimizer, in_float16)
        self.scaler = torch.amp.GradScaler(case.device, enabled=in_float16)

    def update(self) -> None:
        """Clip the gradient, step the optimizer and free the gradients."""
        if self._longest is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.setup.module.parameters(), self._longest)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, part: MicroBatch) -> Tensor:
        self.parallel.average_gradients(not self._waiting)
        with samples(self.chosen[part.rows]):
            return super()._forward(part)

    def _add(self, loss: Tensor) -> None:
        super()._add(self.scaler.scale(loss))


def _check(case: TrainingCase, optimizer: torch.optim.Optimizer, in_float16: bool) -> None:
    if not isinstance(optimizer, HoldsGradients | StepsInBackward):
        return
    asked = f"max_grad_norm = {case.max_grad_norm}" if case.max_grad_norm is not None else "autocast in float16"
    if in_float16 or case.max_grad_norm is not None:
        raise UsageError(
            f"{case.scheme} takes each gradient as soon as it is known; {asked} needs all of them before the step: "
            "leave one of the two out"
        )
