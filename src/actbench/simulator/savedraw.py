"""What a part of autograd's graph saves as it is, not packed by hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node


def saved_raw(ends: Iterable[Node | None], first_node: int) -> set[int]:
    """Return the ids of storages that nodes save raw: those above ``ends``, with numbers from ``first_node`` on.

    Nothing is unpacked. A tensor that a hook packed does not count, and neither does one that a function of Python
    keeps as an attribute.
    """
    found: set[int] = set()
    for node in _nodes(ends, first_node):
        for name in _names(type(node)):
            saved = getattr(node, name)
            for each in saved if isinstance(saved, tuple | list) else (saved,):
                if each.unpack_hook is None and isinstance(each.data, Tensor):
                    found.add(id(each.data.untyped_storage()))
    return found


def _nodes(ends: Iterable[Node | None], first_node: int) -> Iterator[Node]:
    waiting, seen = list(ends), set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= first_node:
            seen.add(node)
            yield node
            waiting += (earlier for earlier, _ in node.next_functions)


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the attributes of a kind of node that have what it saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
