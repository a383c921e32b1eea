"""Partitions compiled graphs by a memory budget, with random numbers drawn once.

torch's min-cut partitioner recomputes operators that a small ``activation_memory_budget`` has no room for, even those
that draw random numbers: then the backward pass has another dropout mask, and the gradient is wrong. Here drawn numbers
are always saved, and a graph that would still draw them again is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from actbench.errors import ConversionError

_LEAST_BUDGET = 1e-6  # at 0 the partitioner saves only inputs, whatever is marked
_MARK = "recompute"  # the partitioner's key for what a checkpoint, or this file, decides about an operator


class Partition(CustomPartitionerFn):
    """Splits a joint graph into a forward and a backward graph.

    Args:
        budget: The share that may be saved of what budget 1 saves, 0 to 1.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of the forward and of the backward pass.

        Raises:
            ConversionError: The backward pass would draw random numbers of the forward pass again.
        """
        drawing = [node for node in gm.graph.nodes if _draws(node) and _MARK not in node.meta]
        for node in drawing:  # a checkpoint's own draw again correctly, from the generator's state
            node.meta[_MARK] = CheckpointPolicy.MUST_SAVE
        kept = {node.name for node in drawing}
        budget = max(self.budget, _LEAST_BUDGET) if drawing else self.budget
        with config.patch(activation_memory_budget=budget):
            kwargs.setdefault("compiler", "inductor")
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        twice = kept & {node.name for node in forward.graph.nodes} & {node.name for node in backward.graph.nodes}
        if any(_draws(node) for node in backward.graph.nodes if node.name in twice):
            raise ConversionError(
                f"compile: the backward pass would draw random numbers of the forward pass again ({min(twice)}), and "
                "the gradient would be wrong; take a model without dropout, or leave compile out"
            )
        return forward, backward

    def uuid(self) -> Any:
        """Return a key of graphs that this splits, for torch's caches on disk."""
        return get_hash_for_files((__file__,), str(self.budget))


def _draws(node: Node) -> bool:
    """Return whether an operator draws random numbers; fused attention does if it has dropout."""
    operator: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return True
