from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt, field_validator

from actbench.errors import ConversionError, NothingToConvertError
from actbench.nn.recomputed import RecomputedForward, blocks
from actbench.nn.replacement import census
from actbench.nn.wrapped import bind_entries, unbind_entries
from actbench.results.records import Site
from actbench.schemes.base import Change, Scheme
from actbench.setup import Part, TrainingSetup

_IDLE = "they are in evaluation mode, where blocks run but once; put them in training mode"


class Checkpoint(Scheme):
    """The blocks of a model keep their inputs only and run a second time in the backward pass.

    Paper: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    Kept for backward: what goes into each block, and copies of the buffers that it writes. Gradients are exact: dropout
    masks are drawn again as they were, the second run finds the buffers of before the first, and they stay as the first
    left them. State that is no buffer (an attribute, a generator of one's own) cannot be known, and is changed twice.
    Caches of keys and values stay as they are given in training.
    Not reproduced: the choice of segments by a memory budget.

    Attributes:
        every: Recompute the first of every so many blocks; 1 recomputes all.
        blocks: Names of the classes that are blocks, for a model whose blocks are not known.
    """

    name: ClassVar[str] = "checkpoint"
    summary: ClassVar[str] = "blocks keep their inputs only and run again in the backward pass; gradients are exact"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv 1604.06174"
    rank: ClassVar[int] = 30

    every: PositiveInt = 1
    blocks: tuple[str, ...] = ()

    @field_validator("blocks")
    @classmethod
    def _classes(cls, blocks: tuple[str, ...]) -> tuple[str, ...]:
        for name in blocks:
            if "/" in name:  # specifications divide the names by it
                raise ValueError(f"{name!r} is not the name of a class")
        return blocks

    @property
    def changes(self) -> tuple[Change, ...]:
        """What runs again in the backward pass."""
        return ("recomputation",)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a recomputing forward on the blocks.

        Raises:
            ConversionError: The model has no known blocks, or recomputes them already.
        """
        found = blocks(setup.module, self.blocks)
        if not found:
            wanted = f"no module of class {' or '.join(self.blocks)}" if self.blocks else "no block that actbench knows"
            raise NothingToConvertError(
                f"checkpoint: {type(setup.module).__name__} has {wanted}; name the classes of its blocks, such as "
                f"checkpoint,blocks=MyBlock; it holds {census(setup.module)}"
            )
        chosen = found[:: self.every]
        if any(RecomputedForward.of(block) for _, block in chosen):
            raise ConversionError("checkpoint: the model recomputes its blocks already; convert the original model")
        unbind_entries(setup.module)
        for path, block in chosen:
            RecomputedForward(block, setup.path_of(path)).bind()
        bind_entries(setup.module)  # in front: a block that a step calls is a pass, and is recomputed within
        sites = tuple(Site(path=path, was=type(block).__name__, becomes="recomputed") for path, block in chosen)
        return setup.changed(setup.module, sites, by=Part(self.spec, acts=RecomputedForward, idle=_IDLE))
