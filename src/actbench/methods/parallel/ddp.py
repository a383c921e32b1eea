from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from actbench.errors import ConversionError
from actbench.model.records import Site
from actbench.packing.refusals import refuse_unshared
from actbench.scheme.base import DATA_PARALLEL, PLACEMENT, Change, Scheme, refuse_untrained
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Spread
from actbench.scheme.mesh import DATA, mesh_along
from actbench.scheme.setup import Part, TrainingSetup

if TYPE_CHECKING:
    from actbench.methods.parallel.replicated import ReplicatedModel

Count = Annotated[int, Field(ge=2, le=1 << 16)]
"""How many processes train together."""


class OverProcesses(Scheme):
    """Several processes train one model, along one axis of their mesh; a subclass says what part each has."""

    axis: ClassVar[str]
    positional: ClassVar[str | None] = "ranks"
    variants: ClassVar[tuple[str, ...]] = ("",)

    ranks: Count = 8

    @property
    def changes(self) -> tuple[Change, ...]:
        """Which process has what."""
        return (PLACEMENT,)

    @property
    def facets(self) -> Iterable[Facet]:
        """The processes, along the axis."""
        return (Spread({self.axis: self.ranks}, variants=self.variants),)

    def _mesh(self, setup: TrainingSetup) -> DeviceMesh:
        """Return the processes along the axis; a ConversionError if there are not as many."""
        return mesh_along(self.axis, setup.processes.mesh, setup.module, self.ranks, self.spec)


class DataParallel(OverProcesses):
    """Each process trains with batches of its own."""

    axis: ClassVar[str] = DATA

    @property
    def claims(self) -> tuple[str, ...]:
        """Only one scheme may set how data-parallel processes share the model."""
        return (DATA_PARALLEL,)


class _Replicated(DataParallel):
    """Each process has a copy of the model; of the optimizer, a subclass says."""

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Average the gradients of the model in its backward pass.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: There is no loss, there are not as many processes, or gradients of one process alone are
                packed or stepped.
        """
        module, loss = setup.module, setup.loss
        refuse_untrained(self.name, module)
        refuse_unshared(module, f"{self.spec} (DistributedDataParallel)")
        if loss is None:
            raise ConversionError(
                f"{self.spec}: a model brings no loss, and DistributedDataParallel has to be called in its place: "
                "convert the model by the other schemes, and wrap it by torch's DistributedDataParallel(model)"
            )
        group = self._mesh(setup).get_group()
        model = self._replicated(module, group)
        site = Site(path="(gradients)", was="gradients", becomes=f"the mean over {self.ranks} processes")
        changed = setup.changed(module, (site,), by=Part(self.spec))
        return replace(
            changed,
            loss=lambda _, batch: loss(model.forward, batch),
            processes=replace(setup.processes, average=model.average_gradients, gradient_buckets=model.buffers),
        )

    def _replicated(self, module: nn.Module, group: ProcessGroup) -> ReplicatedModel:
        from actbench.methods.parallel.replicated import ReplicatedModel

        return ReplicatedModel(module, group)


class Ddp(_Replicated):
    """Each process trains a copy of the model on a batch of its own; gradients are averaged in the backward pass.

    Paper: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704; by
    torch's ``DistributedDataParallel``.
    Kept by each process: the same as without ``ddp``, and its gradients from step to step, in buckets of 25 MiB,
    which are averaged while the backward pass runs. Under ``accumulate`` the gradients of all but the last micro-batch
    stay outside of the buckets. The batch size is that of one process. Gradients are exact to rounding.

    Attributes:
        ranks: How many processes there are.
        bucket_view: Whether gradients are views of the buckets, torch's ``gradient_as_bucket_view=True``. Without it,
            torch's default, gradients are separate tensors, so that there are two copies of them.
        find_unused: Whether parameters may have no gradient in a step, torch's ``find_unused_parameters=True``. Without
            it, torch's default, the second step of such a model raises torch's error.
    """

    name: ClassVar[str] = "ddp"
    card: ClassVar[Card] = Card(
        summary="a copy of the model in each process, gradients averaged in buckets (DDP)",
        paper="Li et al. 2020, arXiv 2006.15704",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )

    bucket_view: bool = True
    find_unused: bool = False

    def _replicated(self, module: nn.Module, group: ProcessGroup) -> ReplicatedModel:
        from actbench.methods.parallel.replicated import ReplicatedModel

        return ReplicatedModel(module, group, bucket_view=self.bucket_view, find_unused=self.find_unused)


class Zero1(_Replicated):
    """Each process has a copy of the model, as with ``ddp``, and a share of the optimizer's state.

    Paper: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054
    (stage 1).
    Kept by each process: all weights and averaged gradients, in buckets; for each parameter the state of
    ``ceil(elements / ranks)`` elements, which it updates and sends to the others. A parameter whose number of elements
    the ranks do not divide is gathered into a second tensor. Gradients and updates are exact to rounding.
    The optimizer must update each element, or block of elements, independently, as Adam and SGD do.

    Attributes:
        ranks: How many processes there are.
    """

    name: ClassVar[str] = "zero1"
    card: ClassVar[Card] = Card(
        summary="as ddp, with the optimizer's state sharded (ZeRO stage 1)",
        paper="Rajbhandari et al. 2019, arXiv 1910.02054",
        rank=80,  # around what all others have made of modules and optimizer
        variants=(),  # ``actbench fit`` asks what fits on one card
    )

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Average gradients, and step a share of each parameter.

        Raises:
            NothingToConvertError: Nothing is trained.
            ConversionError: As of ``ddp``; or there is no optimizer, or one that needs whole parameters, or a parameter
                has gaps in memory.
        """
        from actbench.methods.parallel.replicated import has_gaps, on_flat_shards

        if setup.make_optimizer is None:
            raise ConversionError(f"{self.spec}: a model brings no optimizer; apply it to a TrainingSetup with one")
        for name, parameter in setup.module.named_parameters():
            if parameter.requires_grad and has_gaps(parameter):
                raise ConversionError(
                    f"{self.spec}: parameter {name!r} of shape {tuple(parameter.shape)} has strides "
                    f"{parameter.stride()}, with gaps in memory, and shares are cut in the order of memory: make it of "
                    "a tensor.contiguous(), or take ddp"
                )
        setup = super().change(setup)
        assert setup.make_optimizer is not None
        group = self._mesh(setup).get_group()
        return replace(setup, make_optimizer=on_flat_shards(setup.make_optimizer, group, self.spec))
