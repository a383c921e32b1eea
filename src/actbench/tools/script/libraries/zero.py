"""The state that another process sends when a ``ZeroRedundancyOptimizer`` brings its shards together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils import _pytree

from actbench.device.patches import Patches
from actbench.tools.script.libraries.importpatches import Change


def changes(_note: Callable[[str], None]) -> Mapping[str, Change]:
    """Return the change of torch's module, which takes half a second to import."""
    return {"torch.distributed.optim.zero_redundancy_optimizer": _sent_without_bytes}


@contextmanager
def _sent_without_bytes(zero: ModuleType) -> Iterator[None]:
    """Let the other processes of a simulated group send what their optimizers hold.

    torch's own way sends pickled bytes, and a process that does not run pickles none.
    """
    own = zero.ZeroRedundancyOptimizer.consolidate_state_dict
    at_work: list[Any] = []

    def consolidate(self: Any, to: int = 0) -> None:
        at_work.append(self)
        try:
            own(self, to)
        finally:
            at_work.pop()

    def broadcast(obj: Any, src_rank: int, group: Any = None, device: Any = "cpu") -> Any:
        here = distributed.get_rank() == src_rank
        sent = obj if here else _state_of(at_work[-1], distributed.get_group_rank(at_work[-1].process_group, src_rank))
        tensors = [leaf for leaf in _pytree.tree_leaves(sent) if isinstance(leaf, Tensor)]
        message = torch.empty(sum(map(_bytes, tensors)), dtype=torch.uint8, device=device)
        distributed.broadcast(message, src=src_rank, group=group)
        if here:
            return obj
        # torch.load puts them where the message is
        return _pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device=device), sent)

    with Patches() as patches:
        patches.set(zero.ZeroRedundancyOptimizer, "consolidate_state_dict", functools.wraps(own)(consolidate))
        patches.set(zero, "_broadcast_object", broadcast)
        yield


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _state_of(optimizer: Any, rank: int) -> dict[str, Any]:
    """Return the state that a process has of its parameters, in host memory: like what this one has of its own."""
    mine, state, groups = optimizer.optim, dict[int, dict[str, Any]](), list[dict[str, Any]]()
    parameter, kept = next(iter(mine.state.items()), (None, {}))
    for group, theirs in zip(mine.param_groups, optimizer._partition_parameters()[rank], strict=True):
        places = range(len(state), len(state) + len(theirs["params"]))
        groups.append({**group, "params": list(places)})
        state |= {place: _like(kept, parameter, each) for place, each in zip(places, theirs["params"], strict=True)}
    return {"state": state if kept else {}, "param_groups": groups}


def _like(kept: dict[str, Any], of: Tensor | None, parameter: Tensor) -> dict[str, Any]:
    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = parameter.shape if of is not None and value.shape == of.shape else value.shape
        return torch.empty(shape, dtype=value.dtype)

    return {name: made(value) for name, value in kept.items()}
