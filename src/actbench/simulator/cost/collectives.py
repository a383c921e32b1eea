"""The collectives of a step: the kind of each, its processes, and the bytes that each process sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import ScriptObject, Tensor, distributed
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "reduce", "send", "receive", "barrier"
]

_RESULT: Final = -1
# by the schemas: those of c10d take outputs before inputs, and functional ones return them
_OF_OPERATORS: Final[Mapping[str, tuple[CollectiveKind, int]]] = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_coalesced_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::alltoall_": ("all-to-all", 1),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::recv_any_source_": ("receive", 0),
    "c10d::barrier": ("barrier", _RESULT),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", _RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", _RESULT),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", _RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all-reduce", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::isend": ("send", 0),
    "_c10d_functional::irecv": ("receive", 0),
}
"""Operators of torch that are collectives, and which argument holds all that is exchanged, or :data:`_RESULT`."""


@dataclass(frozen=True)
class Collective:
    """What processes exchange at once.

    Attributes:
        total_bytes: Bytes of what is gathered, of what is there before it is scattered or exchanged, or of what all
            processes add up.
        ranks: The processes, numbered over all machines.
    """

    kind: CollectiveKind
    total_bytes: int
    ranks: tuple[int, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one process sends, in rings as NCCL's: what all of them add up goes around twice."""
        size = len(self.ranks)
        if size == 1 or self.kind in ("receive", "barrier"):
            return 0
        if self.kind in ("broadcast", "reduce", "send"):
            return self.total_bytes
        # a ring's all-reduce is a reduce-scatter and an all-gather, in each of which a process sends (n - 1) / n
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * (size - 1) * self.total_bytes // size)


def is_collective(func: Any) -> bool:
    """Return whether an operator makes processes exchange something."""
    return func._schema.name in _OF_OPERATORS


def collective_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Collective:
    """Return what a collective operator did that returned ``result``."""
    kind, place = _OF_OPERATORS[func._schema.name]
    ranks = tuple(distributed.get_process_group_ranks(_group(func, args, kwargs)))
    if kind == "barrier":
        return Collective(kind, 0, ranks)
    exchanged = result if place == _RESULT else args[place]
    total = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(exchanged) if isinstance(leaf, Tensor))
    return Collective(kind, total, ranks)


def _group(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> distributed.ProcessGroup:
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    found: Any = named["group_name"] if "group_name" in named else named["process_group"]
    # operators of _c10d_functional have the group's name, those of c10d the group, boxed as a script object
    if isinstance(found, str):
        return _resolve_process_group(GroupName(found))
    return distributed.ProcessGroup.unbox(found) if isinstance(found, ScriptObject) else found
