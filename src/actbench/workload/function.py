"""Models that a function in the user's own Python file builds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch._guards import active_fake_mode
from torch.utils._pytree import tree_leaves, tree_map

from actbench.errors import ModelError, UntraceableError
from actbench.model.records import Case
from actbench.packing.refusals import check_module, refuse_lazy
from actbench.paths import from_home
from actbench.scheme.conditions import Precision
from actbench.scheme.microbatches import Batch, rows_of, shapes
from actbench.scheme.setup import Loss, MakeOptimizer, TrainingSetup
from actbench.simulator.fake import fake_mode, to_fake, without_memory
from actbench.simulator.overrides import full_rows, known_scalars
from actbench.workload import base, losses
from actbench.workload.base import seeded
from actbench.workload.optimizers import make_optimizer
from actbench.workload.userfile import UserFile

CONTRACT = (
    "a function that builds a model must return (model, make_batch, loss) or (model, make_batch, loss, optimizer): "
    "model is an nn.Module; make_batch(n) returns a dict of tensors with n rows each; loss(model, batch) returns a "
    "scalar tensor; optimizer is one of the model's parameters, or a function from the model to one"
)


class _Parts(NamedTuple):
    module: nn.Module
    make_batch: Callable[[int], Batch]
    loss: Loss
    optimizer: optim.Optimizer | Callable[[nn.Module], Any] | None


class FunctionWorkload(base.Workload):
    """The model that a function in the user's own Python file builds: ``file.py:function``.

    The function takes no argument and returns ``(module, make_batch, loss)``: an ``nn.Module``,
    ``make_batch(n) -> dict`` with n samples in any shapes, ``loss(module, batch) -> scalar tensor``; and, optionally,
    an optimizer of the module's parameters, or a function from the module to one. All are called under torch seeds. A
    step that cuts its batch needs n rows of each tensor. If only shapes are wanted, large tensors are fake (see
    :mod:`actbench.simulator.fake`) and have no values::

        def build():
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
            def make_batch(n):
                return {"x": torch.randn(n, 64), "y": torch.randint(10, (n,))}
            def loss(module, batch):
                return nn.functional.cross_entropy(module(batch["x"]), batch["y"])
            return model, make_batch, loss

    If the case names a dtype or an optimizer, it replaces the function's.

    Raises:
        ModelError: The file does not exist or does not run, or has no such function.
    """

    weights_origin = "function"

    def __init__(self, name: str, case: Case) -> None:
        path, _, function = name.rpartition(":")
        self.case = case
        self.spec = case.model
        self._file = UserFile(from_home(path), self.spec)
        self._build = self._file.function(function)
        self._make_batch: Callable[[int], Batch] | None = None
        self._uncut = ""

    def setup(self, *, materialize: bool, seed: int) -> TrainingSetup:
        """Call the function, with fake large tensors if only shapes are wanted.

        Raises:
            ModelError: The function fails, or does not return what it should.
            UntraceableError: Only shapes are wanted, and the function looks at the values of large tensors.
        """
        parts, make = self._built(materialize=materialize, seed=seed)
        self._make_batch = parts.make_batch
        return TrainingSetup(
            module=parts.module,
            loss=self._checked(parts.loss),
            make_optimizer=make,
            precision=Precision(autocast=getattr(torch, self.case.autocast) if self.case.autocast else None),
            micro_batching=replace(losses.in_parts(parts.module), uncut=lambda: self._uncut),
        )

    def batch(self, batch_size: int, *, seed: int) -> Batch:
        """Call ``make_batch``; all tensors go to the CPU, and floating ones get the case's dtype, if it names one.

        Raises:
            ModelError: ``make_batch`` fails, returns no mapping, or returns the same shapes for every n.
            UntraceableError: ``make_batch`` reads values of fake tensors.
        """
        make_batch = self._make_batch or self._batches(seed)
        with seeded(seed):
            batch = self._file.run(lambda: make_batch(batch_size), fakes=active_fake_mode() is not None)
        if not hasattr(batch, "items"):
            found = type(batch).__name__.removeprefix("Fake")
            raise ModelError(f"{self.spec}: make_batch returned {found}, not a dict of tensors; {CONTRACT}")
        batch = dict(batch.items())
        if rows_of(batch) != batch_size:
            if not self._uncut:
                self._check_size(batch, make_batch, batch_size, seed)
            self._uncut = f"make_batch({batch_size}) returns {shapes(batch)}, not {batch_size} rows of each"
        return {key: tree_map(self._input, value) for key, value in batch.items()}

    def _check_size(self, batch: Batch, make_batch: Callable[[int], Batch], batch_size: int, seed: int) -> None:
        """Raise a ModelError if a batch of another size has the same shapes: then the meaning of n is unknown."""
        found = _sizes(batch)
        if not found or any(batch_size in size for size in found):
            return
        other = batch_size // 2 or 2
        with seeded(seed):
            again = self._file.run(lambda: make_batch(other), fakes=active_fake_mode() is not None)
        if _sizes(dict(again.items())) == found:
            raise ModelError(
                f"{self.spec}: make_batch({batch_size}) and make_batch({other}) both return {shapes(batch)}; "
                "make_batch(n) must make a batch of n samples"
            )

    @property
    def _dtype(self) -> torch.dtype | None:
        return None if self.case.dtype is None else getattr(torch, self.case.dtype)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("cpu", value.dtype if self._dtype is None or not value.is_floating_point() else self._dtype)

    def _batches(self, seed: int) -> Callable[[int], Batch]:
        """Return ``make_batch`` of a second model, built without memory if possible."""
        try:
            return self._built(materialize=False, seed=seed)[0].make_batch
        except UntraceableError:
            return self._built(materialize=True, seed=seed)[0].make_batch

    def _built(self, *, materialize: bool, seed: int) -> tuple[_Parts, MakeOptimizer]:
        mode = fake_mode()
        with seeded(seed), nullcontext() if materialize else without_memory(mode):
            parts = self._parts(self._file.run(self._build, fakes=not materialize))
            check_module(parts.module, self.spec)
            before = list(parts.module.parameters())
            self._file.run(lambda: self._in_training(parts.module), fakes=not materialize)
        if not materialize:
            to_fake(parts.module, mode)
        twins: dict[Tensor, Tensor] = dict(zip(before, parts.module.parameters(), strict=True))
        return parts, self._make_optimizer(parts, twins)

    def _in_training(self, module: nn.Module) -> nn.Module:
        return module.train() if self._dtype is None else module.train().to(self._dtype)

    def _parts(self, found: Any) -> _Parts:
        if not isinstance(found, tuple | list):
            raise ModelError(f"{self.spec} returned {type(found).__name__}; {CONTRACT}")
        kinds = ", ".join(type(part).__name__ for part in found)
        if len(found) not in (3, 4):
            raise ModelError(f"{self.spec} returned {len(found)} values ({kinds}); {CONTRACT}")
        module, make_batch, loss, optimizer = (*found, None)[:4]
        is_whole = isinstance(module, nn.Module) and callable(make_batch) and callable(loss)
        if not is_whole or not (optimizer is None or isinstance(optimizer, optim.Optimizer) or callable(optimizer)):
            raise ModelError(f"{self.spec} returned ({kinds}); {CONTRACT}")
        refuse_lazy(module)
        return _Parts(module, make_batch, loss, optimizer)

    def _make_optimizer(self, parts: _Parts, twins: dict[Tensor, Tensor]) -> MakeOptimizer:
        if self.case.optimizer is not None or parts.optimizer is None:
            return make_optimizer(self.case.optimizer)
        if isinstance(parts.optimizer, optim.Optimizer):
            return base.optimizer_as_given(parts.optimizer, parts.module, twins, self.spec)
        return base.optimizer_by(parts.optimizer, self._file.run, self.spec)

    def _checked(self, loss: Loss) -> Loss:
        """Return the user's loss, with clear errors for mistakes in it or in its batch."""

        def checked(module: nn.Module, batch: Batch) -> Tensor:
            try:
                with full_rows(batch), known_scalars(module):
                    value: Any = loss(module, batch)
            except KeyError as error:
                if not _lacks(batch, error) or not self._file.raised(error):
                    raise
                raise ModelError(
                    f"{self._file.line(error)}: the loss asks the batch for {error.args[0]!r}, and make_batch gives "
                    f"{', '.join(map(repr, batch))}"
                ) from error
            if not isinstance(value, Tensor):
                found = type(value).__name__
                raise ModelError(f"{self.spec}: the loss returned {found}, not a scalar tensor; {CONTRACT}")
            if torch.is_grad_enabled() and not value.requires_grad:
                raise ModelError(
                    f"{self.spec}: the loss depends on no parameter that needs a gradient: are all of them frozen, or "
                    "is it detached?"
                )
            return value

        return checked


def _sizes(batch: Batch) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _lacks(batch: Batch, error: KeyError) -> bool:
    return len(error.args) == 1 and isinstance(error.args[0], str) and error.args[0] not in batch
