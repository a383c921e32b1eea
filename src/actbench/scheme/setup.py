"""What is trained and how one step of it runs: the value that workloads make, schemes change and meters read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from actbench.errors import MeasurementError, ModelError, check_argument
from actbench.model.records import Built, Phase, Site, Unreached
from actbench.scheme.checks import innermost, refuse_unsteppable
from actbench.scheme.conditions import Limits, Precision, Processes
from actbench.scheme.microbatches import Batch, MicroBatch, MicroBatching
from actbench.scheme.retainedoutputs import RetainedOutputs
from actbench.scheme.wrapped import HoldsGradients, StepsInBackward
from actbench.units import counted

Loss = Callable[[nn.Module, Batch], Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Part:
    """What one scheme changed in a setup, and how to tell that the scheme acts in a step.

    Attributes:
        spec: Specification of the scheme.
        acts: The ``by`` that the scheme gives to :mod:`actbench.packing.savedtensors`; None for the layers at its
            sites.
        idle: For the error when the sites run and save the same as before: the likely reason, and what to do.
        after: Called after a real step: returns warnings about the figures, and raises an IdleError if the step showed
            that the scheme does nothing.
        sites: The sites that it changed.
        path: Of the module that it changed, where ``only=`` limits the scheme to several.
    """

    spec: str
    acts: Hashable = None
    after: Callable[[], tuple[str, ...]] = tuple
    idle: str = "no gradient is asked of what goes into them; unfreeze what runs before them"
    sites: tuple[Site, ...] = ()
    path: str = ""


@dataclass(frozen=True)
class TrainingSetup:
    """A module with everything that a training step needs, and what schemes have changed so far.

    Attributes:
        module: The model.
        loss: From the model and a batch to a scalar.
        make_optimizer: From the model to its optimizer.
        precision: The types and the memory format in which a step computes.
        micro_batching: How a step cuts its batch.
        processes: The processes that train together.
        limits: Where the setup, as schemes have changed it, does not work.
        expandable_segments: Whether torch's CUDA allocator uses expandable segments.
        keeps_gradients: Whether gradients stay after a step, as zeros.
        retained_outputs: What its loop holds from the step before into a forward pass; None where it frees that in time.
        sites: What schemes changed, in the order of the model.
        unreached: Places that a reader may expect to be changed, and that are not.
        warnings: What has to be said beside every figure of it: that something is only simulated, say.
        parts: What each scheme changed, one after the other.
        built: What the module and its batches are; None where the maker does not say.
        path: Of the module, where it is a part of a model that a scheme is limited to; paths of sites begin with it.
    """

    module: nn.Module
    loss: Loss | None = None
    make_optimizer: MakeOptimizer | None = None
    precision: Precision = field(default_factory=Precision)
    micro_batching: MicroBatching = field(default_factory=MicroBatching)
    processes: Processes = field(default_factory=Processes)
    limits: Limits = field(default_factory=Limits)
    expandable_segments: bool = False
    keeps_gradients: bool = False
    retained_outputs: RetainedOutputs | None = None
    sites: tuple[Site, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    built: Built | None = None
    path: str = ""

    def changed(
        self,
        module: nn.Module,
        sites: tuple[Site, ...],
        unreached: tuple[Unreached, ...] = (),
        *,
        by: Part | None = None,
    ) -> TrainingSetup:
        """Return this setup with another module and further sites.

        Args:
            module: The new module.
            sites: What changed in the module, with paths inside it.
            unreached: What a reader may expect to be changed, and is not; paths as in ``sites``.
            by: The part of the scheme, without its sites; None if the change is not checked to act.
        """
        sites = tuple(site.model_copy(update={"path": self.path_of(site.path)}) for site in sites)
        unreached = tuple(left.model_copy(update={"path": self.path_of(left.path)}) for left in unreached)
        parts = self.parts if by is None else (*self.parts, replace(by, sites=sites, path=self.path))
        return replace(self, module=module, sites=self.sites + sites, unreached=self.unreached + unreached, parts=parts)

    def path_of(self, path: str) -> str:
        """Return the path in the whole model of a path in this setup's module."""
        return f"{self.path}.{path}" if self.path and path else self.path or path

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of the model on a batch, a scalar with its graph.

        Raises:
            MeasurementError: The setup has no loss.
        """
        if self.loss is None:
            raise MeasurementError("a training forward needs a loss; this setup has none")
        with self.autocast():
            return self.loss(self.module, self.cast(batch))

    def cast(self, batch: Batch) -> Batch:
        """Return a batch in the types and the memory format of :attr:`precision`."""
        return self.precision.cast(batch)

    def cut(self, batch: Batch) -> list[MicroBatch]:
        """Return the micro-batches that a step runs one after the other.

        Raises:
            UsageError: The batch must be cut, and its tensors have not the same number of rows, of a sample each.
        """
        return self.micro_batching.cut(batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Compute in the type of :attr:`precision` inside the block."""
        if self.precision.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.module.parameters()).device.type, dtype=self.precision.autocast)


class TrainStep:
    """One training step of a setup on one batch, in parts, so that a meter can read between them.

    It may get its batch later. If that is cut, :meth:`forward` runs the first micro-batch, :meth:`backward` the others.
    ``phase`` is the part that began last. ``around_forward`` is called before and after each forward pass, and
    ``around_cache`` with the tensors of a cache after each pass that fills one. ``notes`` are a meter's.

    Raises:
        MeasurementError: The setup has no loss or no optimizer, or its optimizer has no trained parameter.
        UsageError: No parameter is trained, or the optimizer's step needs a closure.
    """

    trains = True
    """Whether it changes parameters; a generation does not."""

    def __init__(self, setup: TrainingSetup, batch: Batch | None = None) -> None:
        check_argument(setup, TrainingSetup, "TrainStep", "an actbench.TrainingSetup")
        if setup.loss is None or setup.make_optimizer is None:
            raise MeasurementError("a training step needs a loss and an optimizer; this setup has none")
        self.setup = setup
        self.batch = {} if batch is None else batch
        self.phase: Phase | None = None
        self.around_forward: Callable[[], None] = lambda: None
        self.around_cache: Callable[[list[Tensor]], None] = lambda tensors: None
        self.optimizer = setup.make_optimizer(setup.module)
        if self.trains:
            refuse_unsteppable(self.optimizer, setup.module)
        self.notes: tuple[str, ...] = ()
        self._waiting: list[MicroBatch] = []
        self._losses: list[Tensor] = []

    @property
    def batch(self) -> Batch:
        """The batch, in the types and the memory format of the setup."""
        return self._batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self._batch = self.setup.cast(batch)
        self._micro_batches: list[MicroBatch] | None = None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The parts of the batch."""
        if self._micro_batches is None:
            self._micro_batches = self.setup.cut(self.batch)
        return self._micro_batches

    @property
    def waiting(self) -> Sequence[MicroBatch]:
        """The micro-batches whose passes have not begun."""
        return self._waiting

    def skip(self, count: int) -> None:
        """Leave out the passes of the next micro-batches: an observer of the step knows what they do."""
        del self._waiting[:count]

    @property
    def loss(self) -> Tensor:
        """The loss of the batch, detached, between the backward pass and the end of the step."""
        return self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()

    @property
    def optimizer_class(self) -> str:
        """The name of the class that computes the updates, inside any wrapper."""
        return type(innermost(self.optimizer)).__name__

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this batch."""
        asked, found = self.setup.micro_batching.parts, len(self.micro_batches)
        cut_into = f"the batch has {counted(found, 'row')}: it is cut into {counted(found, 'part')}, not {asked}"
        return self.notes if found == asked else (cut_into, *self.notes)

    def forward(self) -> Tensor:
        """Return the loss of the batch, or the weighted loss of its first micro-batch: a scalar with its graph.

        Raises:
            ModelError: The loss is not one number.
            UsageError: The batch cannot be cut.
        """
        self._waiting, self._losses = list(self.micro_batches), []
        return self._next()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss to the parameters, and run both passes of the other micro-batches."""
        self._add(loss)
        while self._waiting:
            loss.detach_()  # else its graph would stay in memory during the next micro-batch
            loss = self._next()
            self._add(loss)

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients before the update, by parameter."""
        if isinstance(self.optimizer, HoldsGradients):
            return self.optimizer.gradients()
        return {p: p.grad for p in self.setup.module.parameters() if p.grad is not None}

    def hold(self) -> None:
        """Keep all gradients until the update, even if the optimizer would step in the backward pass."""
        if isinstance(self.optimizer, StepsInBackward):
            self.optimizer.hold()

    def update(self) -> None:
        """Step the optimizer and free the gradients, unless the setup keeps them."""
        self.phase = "optimizer"
        self.optimizer.step()
        self._zero_gradients()

    def abandon(self) -> None:
        """Free the loss, and the gradients unless the setup keeps them."""
        self._zero_gradients()
        self._losses = []

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.setup.keeps_gradients)

    def __call__(self) -> Tensor:
        """Run the whole step and return the detached loss."""
        self.backward(self.forward())
        self.update()
        loss, self._losses = self.loss, []
        return loss

    def _next(self) -> Tensor:
        """Run the forward pass of the next micro-batch, and return its weighted loss."""
        self.phase = "forward"
        part = self._waiting.pop(0)
        self.setup.processes.average(not self._waiting)
        self.around_forward()
        loss = self._forward(part)
        if loss.numel() != 1:
            raise ModelError(f"the loss is a tensor of shape {tuple(loss.shape)}; it must be one number: take its mean")
        if len(self.micro_batches) > 1:
            # A mean over no labels is NaN; it must add nothing.
            loss = (loss if part.share else loss.nan_to_num()) * part.share
        self._losses.append(loss.detach())
        self.around_forward()
        return loss

    def _forward(self, part: MicroBatch) -> Tensor:
        return self.setup.forward(part.batch)

    def _add(self, loss: Tensor) -> None:
        self.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
