from __future__ import annotations

from typing import ClassVar

from torch import nn

from actbench.nn.recomputed import RecomputedForward
from actbench.nn.selective import Policy, SelectiveForward
from actbench.schemes.base import BLOCKS, SAVED_RESULTS
from actbench.schemes.recomputedblocks import RecomputedBlocks


class Selective(RecomputedBlocks):
    """The blocks of a model keep results of products and attention, and compute the rest again in the backward pass.

    Paper: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, on
    the level of operators as in PyTorch's selective activation checkpointing and torchtitan.
    Kept for backward: what goes into each block, copies of the buffers that it writes, and what matrix products,
    convolutions and fused attention returned, whole: of a fused attention its output and a number a row. Norms,
    activations, dropout and what is added run again. Gradients are exact, as without. A result that is changed in place
    is computed again.
    Not reproduced: recomputing the core of an attention alone, which a fused attention does by itself; sequence
    parallelism.

    Attributes:
        policy: compute_intensive keeps every such result, and half those of every second product and every fused
            attention, as torchtitan does.
        every: Recompute the first of every so many blocks; 1 recomputes all.
        blocks: Names of the classes that are blocks, for a model whose blocks are neither known nor found: modules of
            several layers of one class, side by side.
    """

    name: ClassVar[str] = "selective"
    summary: ClassVar[str] = "blocks keep results of products and attention, and compute the rest again; exact"
    paper: ClassVar[str] = "Korthikanti et al. 2022, arXiv 2205.05198"
    positional: ClassVar[str | None] = "policy"
    claims: ClassVar[tuple[str, ...]] = (BLOCKS, SAVED_RESULTS)
    becomes: ClassVar[str] = "recomputed but for products"

    policy: Policy = "compute_intensive"

    @classmethod
    def worth_trying(cls, batch_size: int) -> tuple[str, ...]:
        """Every second block, all."""
        return (f"{cls.name},every=2", cls.name)

    def bound(self, block: nn.Module, path: str) -> RecomputedForward:
        """Return what runs the rest of a block again."""
        return SelectiveForward(block, path, self.policy)
