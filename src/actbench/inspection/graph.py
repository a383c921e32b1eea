"""What the nodes of autograd's graph keep, read without unpacking anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

_RAW = "_raw_saved_"
_DEEPEST = 4  # how many objects inside one another are searched for tensors


@dataclass(frozen=True)
class Argument:
    """What a node keeps under one name.

    Attributes:
        name: What the node calls it.
        tensors: The tensor, or those that a pack hook put in its place; none where a hook keeps no tensor at all.
    """

    name: str
    tensors: tuple[Tensor, ...]


def nodes_of(loss: Tensor) -> list[Node]:
    """Return every node of the graph of a loss, in the order in which the forward made them."""
    found: set[Node] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return sorted(found, key=lambda node: node._sequence_nr())


def arguments_of(node: Node) -> Iterator[Argument]:
    """Give what a node keeps, of its own or through ``save_for_backward``; hooks that would unpack it do not run."""
    for attribute in dir(node):
        if not attribute.startswith(_RAW):
            continue
        name, saved = attribute.removeprefix(_RAW), getattr(node, attribute)
        if not isinstance(saved, tuple | list):
            yield from _argument(name, saved)
            continue
        name = "saved_tensors" if hasattr(type(node), "saved_tensors") else name  # as functions of Python call them
        for place, item in enumerate(saved):
            yield from _argument(f"{name}[{place}]", item)


def _argument(name: str, saved: Any) -> Iterator[Argument]:
    if saved.data is not None:
        yield Argument(name, tuple(tensors_in(saved.data)))


def tensors_in(kept: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """Give the strided tensors in what a pack hook returned: a tensor, a nesting of them, or an object with some."""
    for leaf in tree_leaves(kept):
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided:
                yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type) and not callable(leaf):
            yield from tensors_in(list(vars(leaf).values()), depth - 1)
