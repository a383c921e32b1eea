"""One training run as an iterator of steps, which a checkpoint may stop between any two."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from actbench import scheme as schemes, workload as workloads
from actbench.errors import UsageError
from actbench.measuring import meters
from actbench.model.records import Case
from actbench.packing.determinism import deterministic_bits
from actbench.scheme.composed import refuse_spread
from actbench.scheme.microbatches import Batch
from actbench.scheme.wrapped import evaluated_weights
from actbench.tools.train.batches import feed
from actbench.tools.train.checkpoint import CheckpointFolder, Progress, restore, state_of
from actbench.tools.train.evaluation import evaluated, evaluating, scores_of
from actbench.tools.train.processes import SINGLE_PROCESS, ProcessGroup
from actbench.tools.train.records import Evaluation, Trained, TrainingCase
from actbench.tools.train.step import LearningStep, Parallel, check_acts, rate_factor
from actbench.workload.optimizers import make_optimizer

_MOST_EVALUATIONS = 20
"""Of a run, unless its case has a number of steps between them."""


class TrainingLoop:
    """A run of a case: the model with its scheme applied, and its progress.

    All schemes of one seed start from the same weights, see the same batches in the same order and draw the same
    dropout masks; a scheme's own state is made anew. Building it waits for no other process of the group.

    Raises:
        ActbenchError: The model, data or scheme cannot be had here, or do not go together.
    """

    def __init__(self, case: TrainingCase, group: ProcessGroup = SINGLE_PROCESS) -> None:
        self.case, self.group = case, group
        scheme = schemes.build(case.scheme)
        refuse_spread(
            scheme,
            "a training run has as many processes as it was started with",
            "leave that scheme out, and start the run by 'torchrun --nproc-per-node N -m actbench train …' for DDP, "
            "or by 'accelerate launch --use_fsdp --fsdp_version 2 -m actbench train …' for FSDP2",
        )
        # what builds the model of a run; the optimizer is made below
        shared = set(Case.model_fields) & set(TrainingCase.model_fields) - {"optimizer", "scheme"}
        described = Case(**{name: getattr(case, name) for name in shared}, meter=case.device)
        self._meter = meters.open_meter(described)
        self._workload = workloads.load_workload(described)
        exact = self._workload.setup(materialize=True, seed=case.seed)
        self._feed = feed(case, self._workload, exact.built.task if exact.built else None, group)
        micro_batching = replace(exact.micro_batching, parts=case.gradient_accumulation)
        momentum = {"momentum": case.momentum} if case.momentum else {}
        make = make_optimizer(case.optimizer, lr=case.learning_rate, weight_decay=case.weight_decay, **momentum)
        exact = replace(exact, make_optimizer=make, micro_batching=micro_batching)
        exact = self._meter.adopt(exact)
        torch.manual_seed(case.seed)
        self._setup = scheme.apply(exact)
        epoch = self._feed.steps_per_epoch
        self.steps = case.steps or (case.epochs or 1) * epoch
        self._interval = case.evaluate_every or max(epoch, math.ceil(self.steps / _MOST_EVALUATIONS))
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._evaluations: list[Evaluation] = []
        self._diverged_at: int | None = None
        self._resumed_at: list[int] = []
        unknown = check_acts(self._setup, self._meter, self._batch(0)) if self._setup.parts else ()
        self._warnings = (*self._workload.warnings, *self._setup.warnings, *unknown)
        torch.manual_seed(seed_of(case.seed, group.rank))  # after the scheme, on which dropout must not depend

    @functools.cached_property
    def _step(self) -> LearningStep:
        return LearningStep(Parallel(self._setup, self.group), self.case, self._batch(0), self._feed.chosen(0))

    @property
    def done(self) -> int:
        """Steps that were taken."""
        return len(self._losses)

    @property
    def finished(self) -> bool:
        """Whether the run reached its end, or its loss is no finite number."""
        return self.done >= self.steps or self._diverged_at is not None

    def check(self) -> None:
        """Raise a UsageError if the model lacks tokens or classes of the data."""
        module, spec, wanted = self._setup.module, self.case.model, self._feed.data
        embeddings = getattr(module, "get_input_embeddings", None)
        needed = wanted.vocabulary
        if embeddings is not None and needed is not None and (known := embeddings().num_embeddings) < needed:
            raise UsageError(
                f"{spec} has {known} tokens and {wanted.name} has {needed}: write vocab_size={needed} after the @"
            )
        with evaluating(module):
            classes = scores_of(module, self._batch(0)).shape[-1]
        if classes < wanted.classes:
            key = "num_labels" if hasattr(module, "config") else "num_classes"
            raise UsageError(
                f"{spec} has {classes} classes and {wanted.name} has {wanted.classes}: write {spec}"
                f"{',' if '@' in spec else '@'}{key}={wanted.classes}"
            )

    def __iter__(self) -> Iterator[float]:
        """Take the steps that are left, and yield the training loss of each."""
        while not self.finished:
            yield self._advance()

    def save(self, folder: CheckpointFolder) -> None:
        """Write a checkpoint between two steps; a StoreError if it cannot be written."""
        state = state_of(self._step, self.group)
        progress = Progress(
            case=self.case,
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            losses=tuple(self._losses),
            step_seconds=tuple(self._seconds),
            evaluations=tuple(self._evaluations),
            diverged_at=self._diverged_at,
            resumed_at=tuple(self._resumed_at),
        )
        self.group.all_succeed(lambda: folder.write(progress, state) if self.group.is_first else None)

    def resume(self, folder: CheckpointFolder) -> None:
        """Go on from a checkpoint, if there is one; a StoreError if it is broken or of another run."""
        found = self.group.all_succeed(lambda: folder.read(self.case) if self.group.is_first else None)
        checkpoint = self.group.broadcast(found)
        if checkpoint is None:
            return
        progress, state = checkpoint
        restore(state, self._step, self.group)
        self._losses, self._seconds = list(progress.losses), list(progress.step_seconds)
        self._evaluations, self._diverged_at = list(progress.evaluations), progress.diverged_at
        self._resumed_at = [*progress.resumed_at, self.done]
        here = (torch.__version__, torch.get_num_threads())
        if (progress.torch, progress.threads) != here:
            then = f"begun under torch {progress.torch} with {progress.threads}"
            now = f"resumed at step {self.done} under torch {here[0]} with {here[1]} threads"
            self._warnings += (f"{now}, {then}: the last bits of the curve may differ",)

    def result(self) -> Trained:
        """Return the result of the finished run; takes two more steps to read the bytes of one."""
        evaluations = tuple(self._evaluations)  # before the weights are moved on
        self._show(0)
        reading = self._reading()
        ranks = self.group.all_gather((reading.activation_bytes, reading.peak_bytes))
        activation_bytes, peak_bytes = zip(*ranks, strict=True)
        return Trained(
            metric=self._feed.data.metric,
            steps=self.steps,
            losses=tuple(self._losses),
            step_seconds=tuple(self._seconds),
            evaluations=evaluations,
            diverged_at=self._diverged_at,
            weights_bytes=reading.weights_bytes,
            optimizer_bytes=reading.optimizer_bytes,
            activation_bytes=max(activation_bytes),
            peak_bytes=max(peak_bytes),
            rank_activation_bytes=activation_bytes if self.group.size > 1 else (),
            rank_peak_bytes=peak_bytes if self.group.size > 1 else (),
            sites=len(self._setup.sites),
            resumed_at=tuple(self._resumed_at),
            weights_origin=self._workload.weights_origin,
            built=self._setup.built,
            warnings=self._warnings,
        )

    def _advance(self) -> float:
        step = self._step
        factor = rate_factor(self.case, self.done, self.steps)
        for group, rate in zip(step.optimizer.param_groups, step.rates, strict=True):
            group["lr"] = rate * factor
        self._show(self.done)
        started = time.perf_counter()
        with deterministic_bits():
            mine = step().item()  # waits for the device, so that the time is the step's
        self._seconds.append(time.perf_counter() - started)
        loss = self.group.mean(mine)
        self._losses.append(loss)
        if not math.isfinite(loss):
            self._diverged_at = self.done
        if self.finished or self.done % self._interval == 0:
            self._evaluate()
        return loss

    def _show(self, step: int) -> None:
        self._step.batch, self._step.chosen = self._batch(step), self._feed.chosen(step)

    def _reading(self) -> meters.MemoryReading:
        """Read the bytes of a step, those in which gradients are averaged included."""
        if self.group.launch.strategy != "ddp":
            return self._meter.memory(self._step)
        self._step()  # torch lays the gradients out anew behind the first step, and then no more
        reading = self._meter.memory(self._step)
        if self.case.device != "cpu":
            return reading
        # The gradients lie in the space that they are averaged in, which was there before the meter looked.
        return replace(reading, peak_bytes=reading.peak_bytes + (reading.gradients_bytes or 0))

    def _evaluate(self) -> None:
        batches = ((self._setup.cast(self._meter.place(batch)), rows) for batch, rows in self._feed.validation())
        metric = self._feed.data.metric
        with self._step.parallel.evaluating(), evaluated_weights(self._step.optimizer):
            self._evaluations.append(evaluated(self._setup.module, batches, self.done, metric, self.group))

    def _batch(self, step: int) -> Batch:
        return self._setup.cast(self._meter.place(self._feed.batch(step)))


def seed_of(seed: int, rank: int) -> int:
    """Return torch's seed in a process: the run's seed in the first."""
    if not rank:
        return seed
    return int.from_bytes(hashlib.sha256(f"rank {seed} {rank}".encode()).digest()[:4])
