"""Which results of a backward pass replace a tensor that a real step changes in place.

Under a dispatch mode, such as that of a simulation, torch's formulas of derivatives and its engine make a new tensor
where they otherwise change one that nobody else refers to: the sum of two gradients, and zeros into which the gradient
of ``topk`` or ``gather`` is scattered.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.function import BackwardCFunction

aten = torch.ops.aten

_MAKE = frozenset((aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default, aten.where.self))
"""Operators by which formulas make a tensor that they then change."""

_CHANGE = frozenset(
    (
        *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_add.default),
        *(aten.index_put.default,),
        *(aten.masked_scatter.default, aten.masked_fill.Scalar, aten.index_fill.int_Tensor, aten.put.default),
    )
)


class InPlace:
    """Follows the operators of backward passes, and tells which of them real steps run in place."""

    def __init__(self) -> None:
        self._made: weakref.ref[torch.UntypedStorage] | None = None
        self._node: int | None = None

    def replaces(self, func: Any, args: Any) -> bool:
        """Return whether the first argument of an operator becomes its result in a real step."""
        if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():  # as while a block is recomputed
            return False
        if func is aten.add.Tensor:
            return _accumulates() and _can_be_added_to(args[0])
        if func not in _CHANGE or self._made is None:
            return False
        return self._made() is args[0].untyped_storage() and self._node is not None and self._node == _node()

    def note(self, func: Any, result: Any) -> None:
        """Note what an operator made."""
        if func in _MAKE and torch._C._current_graph_task_id() >= 0:
            self._made, self._node = weakref.ref(result.untyped_storage()), _node()


def _node() -> int | None:
    """Return a number of the node whose formula runs; None if there is none, or if it is one of Python."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None or isinstance(node, BackwardCFunction) else node._sequence_nr()


def _accumulates() -> bool:
    """Return whether the engine adds two gradients, not the formula of a node."""
    node = torch._C._current_autograd_node()
    return node is None or node.name() == "torch::autograd::AccumulateGrad"


def _can_be_added_to(gradient: Any) -> bool:
    """Return whether autograd would add to a gradient in place; a view has a base, which refers to it too."""
    if not isinstance(gradient, Tensor) or gradient._is_view():
        return False
    return gradient.is_contiguous() or is_non_overlapping_and_dense_or_false(gradient)  # the second takes long
