from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from torch import nn, optim

from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.offload.hostoptimizer import HostOptimizer
from actbench.model.gradient import Gradient
from actbench.model.records import Site, Unreached
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.forward import OFFLOAD, OffloadedForward
from actbench.packing.refusals import refuse_compiled
from actbench.packing.wrapped import bind_entries
from actbench.scheme.base import (
    OPTIMIZER_STATE,
    SAVED_TENSORS,
    WAITING_GRADIENTS,
    Change,
    Scheme,
    refuse_untrained,
)
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet, OwnOptimizer
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = "no module of the model saves a tensor of 1 KiB or more; offload is for larger batches"


class Offload(Scheme):
    """Saved tensors wait in host memory for the backward pass.

    Paper: Rhu et al., "vDNN", arXiv 1602.08124.
    Kept for backward on the device: parameters, buffers, tensors below 1 KiB, and what the loss outside of the model
    saves. Gradients are exact. The tensors of a model on the CPU stay where they are.
    On CUDA copies run on a second stream, beside the computation: a tensor that leaves is held until the next leaves,
    and the backward pass fetches the next tensor ahead.
    Not reproduced: leaving the tensors of some layers on the device where copies would be slower.
    """

    name: ClassVar[str] = "offload"
    card: ClassVar[Card] = Card(
        summary="saved tensors wait in host memory for the backward pass; gradients are exact",
        paper="Rhu et al. 2016, arXiv 1602.08124",
        rank=40,
        is_example=True,
        alternative="gact:L3",
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS,)
    gradient: ClassVar[Gradient] = "exact"

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind an offloading forward on the model.

        Raises:
            ConversionError: The model offloads or packs its saved tensors already, has nothing to train, or is
                compiled.
        """
        if not any(True for _ in setup.module.parameters()):
            kind = type(setup.module).__name__
            raise NothingToConvertError(f"offload: {kind} has no parameters, so it keeps nothing for a backward pass")
        if OffloadedForward.of(setup.module) is not None:
            raise ConversionError("offload: the model offloads its saved tensors already; convert the original model")
        if HookedForward.of(setup.module) is not None:
            raise ConversionError(
                "offload: the model packs its saved tensors by hooks already. Only the innermost hooks run, so offload "
                "would move nothing; gact:L3 moves what it has packed"
            )
        refuse_compiled(setup.module, *OFFLOAD)
        bound = OffloadedForward(setup.module)
        bound.bind()
        bind_entries(setup.module)
        site = Site(path="", was=type(setup.module).__name__, becomes="saved tensors in host memory")
        return setup.changed(setup.module, (site,), by=Part(self.spec, acts=bound.wrapper.packer, idle=_IDLE))


_STATE = "optimizer state"
_UNSHARDED = (
    "optimizer_offload: its copies in host memory are plain tensors, and parameters would be DTensors; in your own "
    "program take FSDP2's offload, fully_shard(..., offload_policy=CPUOffloadPolicy())"
)
_REFUSED = ("capturable", "differentiable")


class OptimizerOffload(Scheme):
    """The state of the optimizer is in host memory, where the CPU runs its step.

    Paper: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840.
    Kept on the device: parameters and their gradients, no state of the optimizer. Page-locked host memory holds copies
    of the parameters and of their gradients, and the state. A step copies all gradients to the host and all parameters
    back: for each parameter, twice its bytes over the bus. Updates are bit for bit those of the same optimizer on the
    CPU. For a model on the CPU nothing moves.
    Not reproduced: copies of gradients during the backward pass, copies of parameters while others are updated, and
    updates that are delayed by one step.
    """

    name: ClassVar[str] = "optimizer_offload"
    card: ClassVar[Card] = Card(
        summary="optimizer state and step in host memory; gradients and updates are exact",
        paper="Ren et al. 2021, arXiv 2101.06840",
        rank=55,
        keeps_updates=True,
        is_example=True,
    )
    claims: ClassVar[tuple[str, ...]] = (OPTIMIZER_STATE, WAITING_GRADIENTS)
    changes: ClassVar[tuple[Change, ...]] = ("optimizer",)

    @property
    def facets(self) -> Iterable[Facet]:
        """The optimizer's wrapper, whose copies are whole tensors."""
        return OwnOptimizer("actbench.optim.HostOptimizer({})"), Limits(unsharded=_UNSHARDED)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Wrap the setup's optimizer so that it steps on the host.

        Raises:
            NothingToConvertError: Nothing is trained.
        """
        refuse_untrained(self.name, setup.module)
        make = setup.make_optimizer
        if make is None:
            reason = "the optimizer is not part of the model; wrap it by actbench.optim.HostOptimizer(optimizer)"
            return setup.changed(setup.module, (), (Unreached(path="", kind=_STATE, reason=reason),))

        def make_on_host(module: nn.Module) -> optim.Optimizer:
            optimizer = make(module)
            _refuse(optimizer)
            return HostOptimizer(optimizer)

        site = Site(path=f"({_STATE})", was=_STATE, becomes="in host memory, stepped by the CPU")
        return replace(setup.changed(setup.module, (site,), by=Part(self.spec)), make_optimizer=make_on_host)


def _refuse(optimizer: optim.Optimizer) -> None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind in (optim.LBFGS, optim.SparseAdam):
        raise ConversionError(
            f"optimizer_offload: the optimizer is {kind.__name__}, and actbench does not know whether its step can "
            "run on copies of the parameters; take one of torch.optim, such as --optimizer adamw"
        )
    for option in _REFUSED:
        if any(group.get(option) for group in optimizer.param_groups):
            raise ConversionError(
                f"optimizer_offload: the optimizer has {option}=True, which a step on the CPU does not support"
            )
