from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn, optim

from actbench.methods.precision import Pure
from actbench.methods.weightcopies.optimizers import AveragingOptimizer, CopyingOptimizer, MasterOptimizer
from actbench.model.records import Site, Unreached
from actbench.packing.refusals import NotInParallel, refuse_flattened
from actbench.scheme.base import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PRECISION,
    STEPPED_TOGETHER,
    Change,
    Scheme,
    refuse_untrained,
)
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet
from actbench.scheme.setup import Part, TrainingSetup

_STATE = "optimizer state"
_WHAT = "gradients that are added up in float32"
_WHY = "each process would add up its own gradients before they are averaged; take autocast, or main_gradients=false"
_SHARED = "it has parameters of several modules in one; use DistributedDataParallel or leave master out"


class Master(Pure):
    """Weights in half precision, with float32 master weights, which the optimizer updates, and float32 main gradients.

    Paper: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740; Megatron-LM and DeepSpeed train so.
    Kept from step to step, for each trained parameter: 2 bytes of weight, 4 of master weight, 4 of main gradient and
    the optimizer's moments in float32, 8 for Adam: 18 bytes. A half-precision gradient is added to its main gradient
    as soon as the backward pass has computed it, and freed. Saved tensors are those of ``pure``. Small updates are not
    lost: master weights keep them.
    Not reproduced: buffers that hold the gradients of many parameters in one tensor, and sharding over processes.

    Attributes:
        dtype: bfloat16 (bf16) or float16 (fp16).
        main_gradients: Whether gradients are added up in float32. Without it, half-precision gradients stay until the
            step, which casts them: 4 more bytes per element until it ends.
    """

    name: ClassVar[str] = "master"
    card: ClassVar[Card] = Card(
        summary="bfloat16 weights with float32 master weights and main gradients, as in Megatron-LM",
        paper="Micikevicius et al. 2017, arXiv 1710.03740",
        rank=3,
        variants=(),  # the code that fit prints has no such optimizer
    )
    claims: ClassVar[tuple[str, ...]] = (PRECISION, OPTIMIZER_STATE, GRADIENTS)
    changes: ClassVar[tuple[Change, ...]] = ("precision", "optimizer", "gradients")

    main_gradients: bool = True

    @property
    def facets(self) -> Iterable[Facet]:
        """Everything but the optimizer has the type; FSDP shards no copies."""
        return (*super().facets, Limits(unsharded="master: it makes no float32 copies of shards; take mixed=bf16"))

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Cast the model, in place, and let the optimizer step float32 copies.

        Raises:
            NothingToConvertError: Nothing is trained, or the model has no floating-point parameters.
            ConversionError: It has another half type, or computes under autocast.
        """
        refuse_untrained(self.name, setup.module)
        made = super().change(setup)
        if self.main_gradients:
            made.module.register_forward_pre_hook(NotInParallel(_WHAT, _WHY))

        earlier: list[weakref.ref[MasterOptimizer]] = []

        def wrap(module: nn.Module, inner: optim.Optimizer) -> CopyingOptimizer:
            refuse_flattened(module, _WHAT, _SHARED)
            for other in filter(None, (each() for each in earlier)):
                other.release()  # only the last one that is made gets gradients
            optimizer = MasterOptimizer(inner, main_gradients=self.main_gradients)
            earlier[:] = [weakref.ref(optimizer)]
            return optimizer

        return _with_copies(self.spec, made, "stepped in float32", wrap)


class Ema(Scheme):
    """An exponential moving average of the trained weights is kept, and updated after each step.

    Paper: Polyak and Juditsky 1992, doi 10.1137/0330046; torch has it as ``swa_utils.AveragedModel``, diffusers as
    ``EMAModel``.
    Kept from step to step: one more copy of each trained parameter, in its type, or in float32 if that is a half type,
    which would round a small step of the average away. Loss, gradients and updates are those without the scheme. The
    average moves in place; of half types one parameter after the other, with a temporary of its size in float32.
    Not reproduced: averages of frozen parameters and buffers, which do not change or are not averaged.

    Attributes:
        decay: Weight of the earlier average in each step.
    """

    name: ClassVar[str] = "ema"
    positional: ClassVar[str | None] = "decay"
    card: ClassVar[Card] = Card(
        summary="a moving average of the weights in addition; gradients and updates are exact",
        paper="Polyak and Juditsky 1992, doi 10.1137/0330046",
        rank=55,
        variants=(),  # it saves nothing
    )
    claims: ClassVar[tuple[str, ...]] = (STEPPED_TOGETHER,)
    changes: ClassVar[tuple[Change, ...]] = ("optimizer",)

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999

    @property
    def facets(self) -> Iterable[Facet]:
        """FSDP shards no copies."""
        return (Limits(unsharded="ema: averages of shares are not kept"),)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Let the optimizer move an average of the weights.

        Raises:
            NothingToConvertError: Nothing is trained.
        """
        refuse_untrained(self.name, setup.module)

        def wrap(module: nn.Module, inner: optim.Optimizer) -> CopyingOptimizer:
            return AveragingOptimizer(inner, self.decay)

        return _with_copies(self.spec, setup, "with a moving average of the weights", wrap)


def _with_copies(
    spec: str,
    setup: TrainingSetup,
    becomes: str,
    wrap: Callable[[nn.Module, optim.Optimizer], CopyingOptimizer],
) -> TrainingSetup:
    """Return a setup whose optimizer is wrapped; one without an optimizer tells that it is left."""
    make = setup.make_optimizer
    if make is None:
        reason = "the optimizer is not part of the model"
        return setup.changed(setup.module, (), (Unreached(path="", kind=_STATE, reason=reason),))
    site = Site(path=f"({_STATE})", was=_STATE, becomes=becomes)
    changed = setup.changed(setup.module, (site,), by=Part(spec))
    return replace(changed, make_optimizer=lambda module: wrap(module, make(module)))
