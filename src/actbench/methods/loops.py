"""Loops that hold tensors longer than they must: the model's outputs, and the gradients of the step before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn, optim

from actbench.errors import ConversionError
from actbench.model.records import Site
from actbench.scheme.base import GRADIENTS, WAITING_GRADIENTS, Change, Scheme, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet
from actbench.scheme.microbatches import Batch
from actbench.scheme.retainedoutputs import RetainedOutputs
from actbench.scheme.setup import TrainingSetup
from actbench.scheme.wrapped import HoldsGradients, StepsInBackward, WrappedOptimizer


class KeepOutputs(Scheme):
    """The loop holds the model's outputs in a variable, as ``outputs = model(**batch)`` does, until the next outputs.

    Kept from the forward pass of one step to the end of the next step's forward pass: the model's outputs, such as
    logits, which are otherwise freed as soon as nothing saves them. At the end of a forward pass the outputs of two
    steps are in memory. Loss, gradients and updates are those without the scheme. It saves no memory: it shows what
    such a loop needs.
    """

    name: ClassVar[str] = "keep_outputs"
    card: ClassVar[Card] = Card(
        summary="the loop holds the model's outputs, such as logits, until the next forward pass (saves no memory)",
        rank=56,
        variants=(),
    )
    changes: ClassVar[tuple[Change, ...]] = ()
    claims: ClassVar[tuple[str, ...]] = ("keep the outputs of the model",)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Keep what the model returned last.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There is no loss.
        """
        refuse_untrained(self.name, setup.module)
        if setup.loss is None:
            raise ConversionError(f"{self.name}: a model brings no loop; hold its outputs in a variable of yours")
        held = setup.retained_outputs or RetainedOutputs()
        setup.module.register_forward_hook(held.keep)
        site = Site(path="(outputs)", was="freed", becomes="kept to the next pass")
        return replace(setup.changed(setup.module, (site,)), retained_outputs=held)


class LateOptimizer(WrappedOptimizer):
    """Another optimizer whose gradients stay in memory until :meth:`forget`, in the next forward pass.

    Raises:
        ConversionError: The inner optimizer holds gradients itself, or steps within the backward pass.
    """

    unscalable: ClassVar[str] = "gradients that stay until the next backward pass"
    remedy: ClassVar[str] = "leave late_zero_grad out"

    def __init__(self, inner: optim.Optimizer) -> None:
        if isinstance(inner, HoldsGradients | StepsInBackward):
            raise ConversionError(f"late_zero_grad: {type(inner).__name__} holds or steps gradients itself")
        super().__init__(inner)
        self._kept: list[Tensor] = []

    def gradients(self) -> Mapping[Tensor, Tensor]:
        """Return the gradients by parameter."""
        return {parameter: parameter.grad for parameter in self.parameters() if parameter.grad is not None}

    def gradient_parts(self) -> Iterable[Tensor]:
        """Return the gradients of the step before, as long as they are there."""
        return self._kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take the gradients off the parameters, and keep them; without ``set_to_none`` they stay there as zeros."""
        if not set_to_none:
            self.forget()
        elif found := list(self.gradients().values()):
            self._kept = found
        super().zero_grad(set_to_none)

    def forget(self) -> None:
        """Free the gradients of the step before."""
        self._kept = []

    def _step(self) -> None:
        self.inner.step()


class LateZeroGrad(Scheme):
    """The loop calls ``optimizer.zero_grad()`` before ``loss.backward()``, and not after ``optimizer.step()``.

    Kept until the end of the next forward pass: the gradients of the step before, with the size of the trained
    parameters. Loss, gradients and updates are those without the scheme. It saves no memory: it shows what such a loop
    needs.
    """

    name: ClassVar[str] = "late_zero_grad"
    card: ClassVar[Card] = Card(
        summary="gradients are freed only before the next backward pass, and take memory until then (saves no memory)",
        rank=57,
        variants=(),
    )
    changes: ClassVar[tuple[Change, ...]] = ()
    claims: ClassVar[tuple[str, ...]] = (GRADIENTS, WAITING_GRADIENTS)

    @property
    def facets(self) -> Iterable[Facet]:
        """The scheme does not follow the gradients of shards."""
        return (Limits(unsharded="late_zero_grad: it does not follow the gradients of shards"),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Let gradients stay until the loss of the next step is known.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There is no loss or no optimizer.
        """
        refuse_untrained(self.name, setup.module)
        make, loss = setup.make_optimizer, setup.loss
        if make is None or loss is None:
            raise ConversionError(f"{self.name}: a model brings no loop; call optimizer.zero_grad() where you want")
        made: list[weakref.ref[LateOptimizer]] = []
        held = setup.retained_outputs or RetainedOutputs()

        def wrapped(module: nn.Module) -> LateOptimizer:
            optimizer = LateOptimizer(make(module))
            made.append(weakref.ref(optimizer))
            return optimizer

        def then_forget(module: nn.Module, batch: Batch) -> Tensor:
            found = loss(module, batch)
            for optimizer in filter(None, (each() for each in made if not held.stays)):
                optimizer.forget()
            return found

        changed = setup.changed(setup.module, (Site(path="(weight gradients)", was="freed", becomes="kept"),))
        return replace(changed, make_optimizer=wrapped, loss=then_forget, retained_outputs=held)
