from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Self

from pydantic import PositiveInt, field_validator, model_validator
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.methods.checkpointing.selective import KeptResults, Operators, Policy, SelectiveForward
from actbench.model.records import Site
from actbench.packing.blocks import blocks, repeated
from actbench.packing.replacement import census
from actbench.packing.wrapped import bind_entries, refuse_hooks_inside, unbind_entries
from actbench.scheme.base import BLOCKS, SAVED_RESULTS, Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, Needs, Periodic
from actbench.scheme.setup import Part, TrainingSetup

_IDLE = "they are in evaluation mode, where blocks run but once; put them in training mode"


class RecomputedBlocks(Scheme):
    """The blocks of a model run again in the backward pass.

    A subclass gives the docstring, the names of the registry, and the forward to bind on a block.
    """

    claims: ClassVar[tuple[str, ...]] = (BLOCKS,)
    changes: ClassVar[tuple[Change, ...]] = ("recomputation",)

    every: PositiveInt = 1
    blocks: tuple[str, ...] = ()

    @field_validator("blocks")
    @classmethod
    def _classes(cls, blocks: tuple[str, ...]) -> tuple[str, ...]:
        for name in blocks:
            if "/" in name:  # the separator of names in specifications
                raise ValueError(f"{name!r} is not the name of a class")
        return blocks

    @property
    def facets(self) -> Iterable[Facet]:
        """One of ``every`` blocks is recomputed, and a model has to have blocks."""
        return Periodic(self.every), Needs(lambda module: self._for(module)._blocks_of(module))

    @property
    def becomes(self) -> str:
        """What a block's site reports."""
        return "recomputed"

    @property
    def part(self) -> Part:
        """How to tell that the scheme acts."""
        return Part(self.spec, acts=RecomputedForward, idle=_IDLE)

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward to bind on a block at this path."""
        raise NotImplementedError

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with its blocks changed; if none is known, the repeated modules of its whole model."""
        changed = super(RecomputedBlocks, self._for(setup.module)).apply(setup)
        refuse_hooks_inside(changed.module)  # those of a scheme before may be in a part of the model
        return changed

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a recomputing forward on the blocks.

        Raises:
            ConversionError: The model has no blocks, or recomputes them already.
        """
        chosen = self._blocks_of(setup.module)[:: self.every]
        if any(RecomputedForward.of(block) for _, block in chosen):
            raise ConversionError(f"{self.name}: the model recomputes its blocks already; convert the original model")
        unbind_entries(setup.module)
        for path, block in chosen:
            self.bound(block, setup.path_of(path)).bind()
        bind_entries(setup.module)  # in front: a block that a step calls itself is a pass, and is recomputed inside it
        sites = tuple(Site(path=path, was=type(block).__name__, becomes=self.becomes) for path, block in chosen)
        return setup.changed(setup.module, sites, by=self.part)

    def _for(self, model: nn.Module) -> Self:
        """Return the scheme for a whole model: without names and known blocks, it recomputes repeated modules."""
        if self.blocks or blocks(model):
            return self
        return self.model_copy(update={"blocks": tuple({type(block).__name__: None for _, block in repeated(model)})})

    def _blocks_of(self, module: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        if found := blocks(module, self.blocks):
            return found
        wanted = f"no module of class {' or '.join(self.blocks)}" if self.blocks else "no block that actbench knows"
        raise NothingToConvertError(
            f"{self.name}: {type(module).__name__} has {wanted}; name the classes of its blocks, such as "
            f"{self.name},blocks=MyBlock; it holds {census(module, containers=True)}"
        )


class Checkpoint(RecomputedBlocks):
    """The blocks of a model save only their inputs and run a second time in the backward pass.

    Paper: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    Kept for backward: the inputs of each block, and copies of the buffers that it writes. Gradients are exact: the
    second run draws the same dropout masks and starts from the buffers before the first run; afterwards the buffers are
    as the first run left them. State that is no buffer (an attribute, a private generator) cannot be found, and changes
    twice. In training a block leaves caches of keys and values as it gets them.
    Not reproduced: the choice of segments by a memory budget.

    Attributes:
        every: Recompute the first of each ``every`` blocks; 1 recomputes all.
        blocks: Names of the classes of the blocks, for a model whose blocks actbench neither knows nor finds. It finds
            neighbouring modules of one class that hold several layers.
    """

    name: ClassVar[str] = "checkpoint"
    card: ClassVar[Card] = Card(
        summary="blocks save only their inputs and run again in the backward pass; gradients are exact",
        paper="Chen et al. 2016, arXiv 1604.06174",
        rank=30,
        variants=(",every=4", ",every=2", ""),
        is_example=True,
    )

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward that runs a whole block again."""
        return RecomputedForward(block, path)


class Selective(RecomputedBlocks):
    """The blocks of a model save results of products and attention, and recompute the rest in the backward pass.

    Paper: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, on
    the level of operators as in PyTorch's selective activation checkpointing and torchtitan.
    Kept for backward: the inputs of each block, copies of the buffers that it writes, and the whole results of matrix
    products, convolutions and fused attention (its output and a number a row). Norms, activations, dropout and sums run
    again. Gradients are exact. A result that is changed in place is recomputed.
    Not reproduced: recomputing the core of an attention alone, which a fused attention does by itself; sequence
    parallelism.

    Attributes:
        policy: compute_intensive saves every such result; half saves those of every second product and every fused
            attention, as torchtitan does.
        keep: Operators whose results are saved in place of what the policy names: linear, bmm, softmax, convolution,
            attention.
        every: Recompute the first of each ``every`` blocks; 1 recomputes all.
        blocks: Names of the classes of the blocks, for a model whose blocks actbench neither knows nor finds. It finds
            neighbouring modules of one class that hold several layers.
    """

    name: ClassVar[str] = "selective"
    positional: ClassVar[str | None] = "policy"
    card: ClassVar[Card] = Card(
        summary="blocks save results of products and attention, and compute the rest again; exact",
        paper="Korthikanti et al. 2022, arXiv 2205.05198",
        rank=30,
        variants=(",every=2", ""),
    )
    claims: ClassVar[tuple[str, ...]] = (BLOCKS, SAVED_RESULTS)

    policy: Policy = "compute_intensive"
    keep: tuple[Operators, ...] = ()

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.keep and self.policy != "compute_intensive":
            raise ValueError(f"keep= names what is saved, and so does policy={self.policy}; leave one of the two out")
        return self

    @property
    def becomes(self) -> str:
        """What a block's site reports."""
        return f"recomputed but for {' and '.join(self.keep) or 'products'}"

    @property
    def part(self) -> Part:
        """How to tell that the scheme acts: with ``keep``, that it saves a result."""
        if not self.keep:
            return super().part
        return Part(self.spec, acts=KeptResults, idle=f"they run no operator that keep={'/'.join(self.keep)} names")

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward that runs the rest of a block again."""
        return SelectiveForward(block, path, self.policy, self.keep)
