"""The graph that autograd builds in a forward pass."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import Node


def nodes_of(*losses: Tensor) -> list[Node]:
    """Return every node in the graph of losses, in forward order."""
    found: set[Node] = set()
    waiting = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    # nodes are numbered in the order in which they are made
    return sorted(found, key=lambda node: node._sequence_nr())


def is_reentrant(*losses: Tensor) -> bool:
    """Return whether a part of the graph is recomputed by torch's reentrant checkpointing.

    Such a part first runs without gradients, and has a graph of its own only in the backward pass.
    """
    # the node of CheckpointFunction in torch/utils/checkpoint.py
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of(*losses))
