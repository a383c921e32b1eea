from __future__ import annotations

from typing import ClassVar

from torch import nn

from actbench.nn.recomputed import RecomputedForward
from actbench.schemes.recomputedblocks import RecomputedBlocks


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
    summary: ClassVar[str] = "blocks keep their inputs only and run again in the backward pass; gradients are exact"
    paper: ClassVar[str] = "Chen et al. 2016, arXiv 1604.06174"

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Every fourth block, every second block, all blocks."""
        return (f"{cls.name},every=4", f"{cls.name},every=2", cls.name)

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward that runs a whole block again."""
        return RecomputedForward(block, path)
