"""A scheme that is held to its contract, and the models that it is tried on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actbench import scheme as schemes, workload as workloads
from actbench.errors import NothingToConvertError
from actbench.measuring import inspection
from actbench.model.records import Case
from actbench.scheme import Scheme
from actbench.scheme.conditions import Limits
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.simulator.overrides import without_dropout
from actbench.workload.base import Workload

OF_STEPS = frozenset(("optimizer", "gradients", "precision", "batch", "memory format", "placement over processes"))
"""Changes that a model alone cannot have, so that there is nothing to convert, undo or save."""

_loaded: Callable[[Case], Workload] = functools.cache(workloads.load_workload)


@dataclass(frozen=True)
class Subject:
    """A scheme, and the case of a plain model."""

    scheme: Scheme
    case: Case

    @classmethod
    def of(cls, scheme: str | Scheme, on: str, batch_size: int) -> Subject:
        """Return the subject for what :func:`actbench.testing.check_scheme` takes."""
        case = Case(model=on, batch_size=batch_size, sequence_length=16, gradient_quality=False, meter="cpu")
        return cls(schemes.build(scheme) if isinstance(scheme, str) else scheme, case)

    @property
    def batch(self) -> Batch:
        """A batch of the plain model."""
        return _loaded(self.case).batch(self.case.batch_size, seed=0)

    @property
    def saves_less(self) -> bool:
        """Whether the scheme promises that a step saves fewer bytes for backward."""
        return not {"saved tensors", "recomputation", "loss"}.isdisjoint(self.scheme.changes)

    @property
    def is_of_model(self) -> bool:
        """Whether the scheme changes a model, and nothing else than it."""
        return bool(self.scheme.changes) and OF_STEPS.isdisjoint(self.scheme.changes)

    @property
    def trains_others(self) -> bool:
        """Whether the scheme trains other parameters than the plain model has."""
        return "parameters" in self.scheme.changes

    @property
    def untraceable(self) -> bool:
        """Whether fake tensors do not show what the scheme saves."""
        limits = self.scheme.facet(Limits)
        return limits is not None and bool(limits.untraceable)

    @property
    def unsimulated(self) -> bool:
        """Whether a step under the scheme is not simulated."""
        limits = self.scheme.facet(Limits)
        return limits is not None and bool(limits.unsimulated)

    def plain(self) -> TrainingSetup:
        """Return the setup of the plain model, with the same weights each time."""
        return _loaded(self.case).setup(materialize=True, seed=0)

    def changed(self) -> TrainingSetup:
        """Return that setup under the scheme."""
        return self.scheme.apply(self.plain())

    def pair(self) -> tuple[TrainingSetup, TrainingSetup, Batch]:
        """Return a model without and with the scheme, and a batch of it, for checks that take many passes.

        It is the first small network in which the scheme finds something to change, or else the plain model itself.
        """
        for make in NETWORKS:
            with suppress(NothingToConvertError):
                changed, plain = self.scheme.apply(_small(make)), _small(make)
                return plain, changed, _small_batch(plain)
        return self.plain(), self.changed(), self.batch


def _small(make: Callable[[], nn.Module]) -> TrainingSetup:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TrainingSetup(
            make(),
            loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )


def _small_batch(setup: TrainingSetup) -> dict[str, Tensor]:
    """Return a batch of a small network."""
    random = torch.Generator().manual_seed(1)
    images = any(isinstance(part, nn.Conv2d) for part in setup.module.modules())
    x = torch.randn((16, 4, 12, 12) if images else (64, 24), generator=random) + 0.5
    return {"x": x, "y": torch.randn((16 if images else 64, 4), generator=random)}


def _rectified() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def _smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def _convolutions() -> nn.Module:
    blocks = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU()
    return nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4))


NETWORKS = _rectified, _smooth, _convolutions
"""Small networks; in the first, gradients are linear in each saved tensor."""


def gradients(setup: TrainingSetup, batch: Batch, seed: int = 0, *, dropout: bool = True) -> dict[str, Tensor]:
    """Return the gradients before the update, by the parameter's name, in float64, from passes with this seed."""
    torch.manual_seed(seed)
    step = TrainStep(setup, batch)
    step.hold()
    with nullcontext() if dropout else without_dropout(setup.module):
        step.backward(step.forward())
    found = step.gradients()
    named = {name: found[p].detach().double() for name, p in setup.module.named_parameters() if p in found}
    step.abandon()
    return named


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return gradients as one vector."""
    return torch.cat([each.flatten() for each in gradients.values()])


@functools.cache
def plain_gradient(case: Case, dropout: bool) -> Tensor:
    """Return the gradient of a plain model."""
    subject = Subject(schemes.build("exact"), case)
    return flat(gradients(subject.plain(), subject.batch, dropout=dropout))


@functools.cache
def plain_trace(case: Case) -> inspection.Trace:
    """Return what a step of a plain model saves for backward."""
    subject = Subject(schemes.build("exact"), case)
    return inspection.trace(subject.plain(), lambda: subject.batch)


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the exact vector."""
    return float((found - exact).norm() / exact.norm())


def loss_of(setup: TrainingSetup, batch: Batch) -> Tensor:
    """Return the loss of a batch, with seed 1, without its graph."""
    torch.manual_seed(1)
    return setup.forward(batch).detach()


def message_of(error: BaseException) -> str:
    """Return the messages of an error and of those that led to it: compilers wrap what a model raises."""
    found: list[Any] = [error]
    while found[-1] is not None:
        found.append(found[-1].__cause__ or found[-1].__context__)
    return "; ".join(f"{type(each).__name__}: {each}" for each in found[:-1])
