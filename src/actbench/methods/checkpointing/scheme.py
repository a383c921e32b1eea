from __future__ import annotations

from typing import ClassVar

from torch import nn

from actbench.methods.checkpointing.checkpoint import RecomputedBlocks
from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.methods.checkpointing.selective import Policy, SelectiveForward
from actbench.scheme.base import BLOCKS, SAVED_RESULTS
from actbench.scheme.card import Card


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
        every: Recompute the first of each ``every`` blocks; 1 recomputes all.
        blocks: Names of the classes of the blocks, for a model whose blocks actbench neither knows nor finds. It finds
            neighbouring modules of one class that hold several layers.
    """

    name: ClassVar[str] = "selective"
    positional: ClassVar[str | None] = "policy"
    card: ClassVar[Card] = Card(
        summary="blocks keep results of products and attention, and compute the rest again; exact",
        paper="Korthikanti et al. 2022, arXiv 2205.05198",
        rank=30,
        variants=(",every=2", ""),
    )
    claims: ClassVar[tuple[str, ...]] = (BLOCKS, SAVED_RESULTS)
    becomes: ClassVar[str] = "recomputed but for products"

    policy: Policy = "compute_intensive"

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return the forward that runs the rest of a block again."""
        return SelectiveForward(block, path, self.policy)
