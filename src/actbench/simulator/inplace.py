"""Which results of a backward pass replace a tensor that a real step changes in place.

Under a dispatch mode, such as that of a simulation, torch's formulas of derivatives and its engine make a new tensor
where they otherwise change one without other references: the sum of two gradients, and zeros into which the gradient
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
        self._number: int | None = None
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._filled: weakref.ref[torch.UntypedStorage] | None = None

    def replaces(self, func: Any, args: Any) -> bool:
        """Return whether the first argument of an operator becomes its result in a real step."""
        if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():  # as while a block is recomputed
            return False
        if func is aten.add.Tensor:
            return _can_be_added_to(args[0]) and self._accumulates(args[0])
        filled = None if self._filled is None or func not in _CHANGE else self._filled()
        if filled is None or filled is not args[0].untyped_storage():
            return False
        return self._is_of_node(filled) and not isinstance(_node(), BackwardCFunction)

    def note(self, func: Any, result: Any) -> None:
        """Note what an operator made, and for which node of the graph."""
        if torch._C._current_graph_task_id() < 0 or not isinstance(result, Tensor):
            return
        if result.layout is not torch.strided or result._is_view():  # a sparse tensor has no storage
            return
        number, storage = _number(), result.untyped_storage()
        if number != self._number:
            self._number, self._made = number, weakref.WeakSet()
        self._made.add(storage)
        if func in _MAKE:
            self._filled = weakref.ref(storage)

    def _accumulates(self, gradient: Tensor) -> bool:
        """Return whether autograd's engine adds to a gradient, not a formula to a term that it made.

        A node is the current one until the next begins, so that its gradients are added while it is. Two of them are
        added to each other where both are of one tensor, as those of ``x * x`` are.
        """
        if not self._is_of_node(gradient.untyped_storage()):
            return True
        given = [each for each in _node().next_functions if each[0] is not None]
        return len(given) > len(set(given))

    def _is_of_node(self, storage: torch.UntypedStorage | None) -> bool:
        return self._number is not None and self._number == _number() and storage in self._made


def _node() -> Any:
    """Return the node of the graph that runs, or did last."""
    return torch._C._current_autograd_node()


def _number() -> int | None:
    node = _node()
    return None if node is None else node._sequence_nr()


def _can_be_added_to(gradient: Any) -> bool:
    """Return whether autograd would add to a gradient in place; a view has a base, which refers to it too."""
    if not isinstance(gradient, Tensor) or gradient._is_view():
        return False
    return gradient.is_contiguous() or is_non_overlapping_and_dense_or_false(gradient)  # the second takes long
