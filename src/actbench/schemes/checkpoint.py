from __future__ import annotations

from typing import ClassVar

from torch import nn

from actbench.nn.recomputed import RecomputedForward
from actbench.schemes.recomputedblocks import RecomputedBlocks


class Checkpoint(RecomputedBlocks):
    """The blocks of a model keep their inputs only and run a second time in the backward pass.

    Paper: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    Kept for backward: what goes into each block, and copies of the buffers that it writes. Gradients are exact: dropout
    masks are drawn again as they were, the second run finds the buffers of before the first, and they stay as the first
    left them. State that is no buffer (an attribute, a generator of one's own) cannot be known, and is changed twice.
    Caches of keys and values stay as they are given in training.
    Not reproduced: the choice of segments by a memory budget.

    Attributes:
        every: Recompute the first of every so many blocks; 1 recomputes all.
        blocks: Names of the classes that are blocks, for a model whose blocks are neither known nor found: modules of
            several layers of one class, side by side.
    """

    name: ClassVar[str] = "checkpoint"
    summary: ClassVar[str] = "blocks keep their inputs only and run again in the backward pass; gradients are exact"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv 1604.06174"

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Every fourth block, every second, all."""
        return (f"{cls.name},every=4", f"{cls.name},every=2", cls.name)

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return what runs the whole of a block again."""
        return RecomputedForward(block, path)
