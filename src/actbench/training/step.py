"""One step of a training run, and whether each part of a scheme acts in it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_map

from actbench.errors import ModelError, UntraceableError, UsageError
from actbench.foreign import boundary
from actbench.measuring.inspection import refuse_idle, trace
from actbench.measuring.meters import Meter
from actbench.nn.saved.samplegradients import samples
from actbench.results.runs import TrainingCase
from actbench.setup import Batch, HoldsGradients, TrainingSetup, TrainStep
from actbench.training.parallel import Parallel


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
    """Run one forward pass on fake tensors, and refuse a scheme of which a part does nothing in it.

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
    for part in setup.parts:
        refuse_idle(part, seen)
    return ()


def _fake(value: Any) -> Any:
    mode = active_fake_mode()
    return mode.from_tensor(value) if isinstance(value, Tensor) and mode is not None else value


class LearningStep(TrainStep):
    """A step of a training run: the batch in parts whose gradients are added up, then averaged, scaled and clipped.

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
        self.parallel, self._parts, self._longest = parallel, case.gradient_accumulation, case.max_grad_norm
        self._losses: list[Tensor] = []
        _check(case, self.optimizer)
        self.scaler = torch.amp.GradScaler(case.device, enabled=case.autocast == "float16")

    def forward(self) -> Tensor:
        """Return the loss of the first part of the batch, a scalar with its graph."""
        self._losses = []
        return self._next()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the first part, and both passes of the others."""
        self._add(loss)
        while len(self._losses) < self._parts:
            self._add(self._next())

    def update(self) -> None:
        """Clip the gradient, step the optimizer and free the gradients."""
        if self._longest is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.setup.module.parameters(), self._longest)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> Tensor:
        """Run the whole step and return the mean loss of the parts, detached."""
        super().__call__()
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean()

    def _next(self) -> Tensor:
        part, rows = len(self._losses), len(self.chosen) // self._parts
        mine = slice(part * rows, (part + 1) * rows)
        batch = {name: value[mine] for name, value in self.batch.items()} if self._parts > 1 else self.batch
        self.parallel.average_gradients(part == self._parts - 1)
        with samples(self.chosen[mine]):
            loss = self.setup.forward(batch)
        self._losses.append(loss.detach())
        return loss

    def _add(self, loss: Tensor) -> None:
        super().backward(self.scaler.scale(loss / self._parts if self._parts > 1 else loss))


def _check(case: TrainingCase, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, HoldsGradients):
        return
    key = "max_grad_norm" if case.max_grad_norm is not None else "autocast" if case.autocast == "float16" else None
    if key is not None:
        raise UsageError(
            f"{case.scheme} packs each gradient as soon as it is known; {key} = {getattr(case, key)!r} needs all of "
            "them before the step: leave one of the two out"
        )
