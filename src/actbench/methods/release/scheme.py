from __future__ import annotations

import weakref
from dataclasses import replace
from typing import ClassVar

from torch import nn

from actbench.errors import ConversionError
from actbench.methods.release.inbackward import StepInBackward
from actbench.model.records import Site
from actbench.packing.refusals import NotInParallel, refuse_flattened
from actbench.scheme.base import GRADIENTS, STEPPED_TOGETHER, STEPS, Change, Scheme, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.setup import MakeOptimizer, TrainingSetup

_WHAT = "parameters that are stepped within the backward pass"
_WHY = "each process would step by its own gradients before they are averaged; leave release out"
_SHARED = "it has parameters of several modules in one; use FSDP2 (fully_shard), or leave release out"


class Release(Scheme):
    """The optimizer steps each parameter as soon as its gradient is computed, and frees the gradient.

    Paper: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv 2306.09782
    (LOMO); torchtune has it as ``optimizer_in_bwd``.
    Kept until the step: no gradient. At the peak, only the few gradients that autograd is computing are in memory,
    instead of one for each parameter. Loss, gradients and updates are bit for bit those without the scheme; a
    tied parameter is updated once, when its whole gradient is computed.
    Not supported: gradients that are accumulated over backward passes, clipped by their norm or scaled, since these
    need all gradients at once; DDP and FSDP1. Under FSDP2 a process updates its rows once the gradients of their block
    are averaged.
    Not reproduced: SGD without state fused into the backward pass, clipping by a second backward pass.
    """

    name: ClassVar[str] = "release"
    card: ClassVar[Card] = Card(
        summary="parameters are updated and gradients freed during the backward pass; updates are exact",
        paper="Lv et al. 2023, arXiv 2306.09782",
        rank=60,
    )
    claims: ClassVar[tuple[str, ...]] = (GRADIENTS, STEPS, STEPPED_TOGETHER)
    changes: ClassVar[tuple[Change, ...]] = ("gradients",)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Wrap the setup's optimizer so that it steps in the backward pass.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There is no optimizer, or gradients are added up over micro-batches.
        """
        refuse_untrained(self.name, setup.module)
        if setup.make_optimizer is None:
            raise ConversionError(
                f"{self.name}: a model brings no optimizer; wrap yours by actbench.optim.StepInBackward(optimizer)"
            )
        parts = setup.micro_batching.parts
        if parts > 1:
            raise ConversionError(
                f"{self.name}: the gradients of {parts} micro-batches are added up before a step; leave "
                "gradient_accumulation or release out"
            )
        setup.module.register_forward_pre_hook(NotInParallel(_WHAT, _WHY))
        site = Site(
            path="(weight gradients)",
            was="weight gradients",
            becomes="stepped within the backward pass",
            bytes_before=sum(parameter.nbytes for parameter in setup.module.parameters() if parameter.requires_grad),
            bytes_after=0,
        )
        return replace(setup.changed(setup.module, (site,)), make_optimizer=_stepping(setup.make_optimizer))


def _stepping(make: MakeOptimizer) -> MakeOptimizer:
    """Return what makes optimizers that step in the backward pass; only the last one made steps."""
    made: list[weakref.ref[StepInBackward]] = []

    def stepping(module: nn.Module) -> StepInBackward:
        refuse_flattened(module, _WHAT, _SHARED)
        for earlier in filter(None, (each() for each in made)):
            earlier.hold()
        optimizer = StepInBackward(make(module))
        made[:] = [weakref.ref(optimizer)]
        return optimizer

    return stepping
