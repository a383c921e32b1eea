from __future__ import annotations

import torch
from torch import Tensor

from actbench.errors import UsageError
from actbench.learning.spreading import Spread
from actbench.nn.keeping.history import samples
from actbench.runs.records import TrainingCase
from actbench.training import Batch, HoldsGradients, TrainStep


class LearningStep(TrainStep):
    """A step of a training run: the batch in parts whose gradients are added up, then averaged, scaled and cut.

    Args:
        spread: What is trained.
        case: Says into how many parts a batch is cut, how long the gradient may be, and in which type it is found.
        batch: This process's share of the first batch.
        chosen: Which samples of the data set these are, int64 (rows,).

    Raises:
        UsageError: The scheme holds gradients in a form of its own, and the case asks to cut or to scale them.

    Attributes:
        spread: As given.
        chosen: To be changed with ``batch``.
        rates: The learning rate of each of the optimizer's groups, before any schedule.
        scaler: Multiplies the loss in float16, where small gradients would be zero, and leaves out steps whose
            gradients are no numbers (Micikevicius et al. 2018, arXiv 1710.03740); elsewhere it does nothing.
    """

    def __init__(self, spread: Spread, case: TrainingCase, batch: Batch, chosen: Tensor) -> None:
        super().__init__(spread.setup, batch)
        self.chosen = chosen
        self.rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self.spread, self._parts, self._longest = spread, case.gradient_accumulation, case.max_grad_norm
        self._losses: list[Tensor] = []
        _check(case, self.optimizer)
        self.scaler = torch.amp.GradScaler(case.device, enabled=case.autocast == "float16")

    def forward(self) -> Tensor:
        """Return the loss of the first part of the batch, a scalar with its graph."""
        self._losses = []
        return self._next()

    def backward(self, loss: Tensor) -> None:
        """Find the gradient of the first part, and run the other parts, each forward and backward."""
        self._add(loss)
        while len(self._losses) < self._parts:
            self._add(self._next())

    def update(self) -> None:
        """Cut the gradient, step the optimizer and free the gradients."""
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
        self.spread.average(part == self._parts - 1)
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
