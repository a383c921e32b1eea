"""The base of schemes that replace torch's Adam by another optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from actbench.errors import ConversionError
from actbench.methods.formats.optim.optimizers import check_fresh
from actbench.model.records import Site, Unreached
from actbench.scheme.base import OPTIMIZER_STATE, Change, Scheme, refuse_untrained
from actbench.scheme.setup import Part, TrainingSetup

_STATE = "optimizer state"
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


class InPlaceOfAdam(Scheme):
    """Replaces torch's Adam or AdamW by another optimizer; a subclass gives the docstring and the optimizer."""

    changes: ClassVar[tuple[Change, ...]] = ("optimizer",)
    claims: ClassVar[tuple[str, ...]] = (OPTIMIZER_STATE,)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace the setup's optimizer.

        Raises:
            NothingToConvertError: Nothing is trained, or no parameter that the optimizer is for.
        """
        refuse_untrained(self.name, setup.module)
        make = setup.make_optimizer
        if make is None:
            reason = f"the optimizer is not part of the model; make one of actbench.optim, as {self.name} does"
            return setup.changed(setup.module, (), (Unreached(path="", kind=_STATE, reason=reason),))

        self._check(setup.module)

        def make_other(module: nn.Module) -> torch.optim.Optimizer:
            return self._in_place_of(make(module), module)

        site = Site(path=f"({_STATE})", was=_STATE, becomes=self._becomes)
        return replace(setup.changed(setup.module, (site,), by=Part(self.spec)), make_optimizer=make_other)

    def _in_place_of(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise ConversionError(
                f"{self.name}: the optimizer is {type(optimizer).__name__}; it takes the place of torch.optim.Adam and "
                "AdamW only: --optimizer adamw"
            )
        check_fresh(optimizer, "let make_optimizer make a fresh one")
        for option in _REFUSED:
            if any(group.get(option) for group in optimizer.param_groups):
                raise ConversionError(f"{self.name}: the optimizer has {option}=True, which it does not take")
        return self._made(optimizer, module)

    @property
    def _becomes(self) -> str:
        raise NotImplementedError

    def _check(self, module: nn.Module) -> None:
        """Refuse a model that has nothing for the optimizer."""

    def _made(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
        raise NotImplementedError
