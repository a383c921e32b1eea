"""Nested dicts, lists and tuples with tensors in them, as JSON beside named tensors. No pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from actbench.errors import StoreError

_TENSOR, _TUPLE, _DICT = "tensor", "tuple", "dict"


def take_apart(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Return a tree as JSON has it, and put its tensors into ``tensors`` under names that begin with ``name``.

    Floats survive exactly: JSON has the shortest text that reads back as the same number.

    Raises:
        StoreError: The tree holds something that neither JSON nor a tensor can say.
    """
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {_TENSOR: name}
    if isinstance(tree, Mapping):
        pairs = [[key, take_apart(value, tensors, f"{name}.{key}")] for key, value in tree.items()]
        if any(not isinstance(key, str | int) for key, _ in pairs):
            raise StoreError(f"{name}: a key that is neither text nor a number cannot be written to a checkpoint")
        return {_DICT: pairs}
    if isinstance(tree, list | tuple):
        items = [take_apart(value, tensors, f"{name}.{place}") for place, value in enumerate(tree)]
        return {_TUPLE: items} if isinstance(tree, tuple) else items
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise StoreError(
        f"{name}: a {type(tree).__name__} cannot be written to a checkpoint; state_dict must hold tensors, numbers, "
        "text, lists, tuples and dicts only"
    )


def put_together(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree that :func:`take_apart` wrote.

    Raises:
        KeyError: A tensor is missing.
    """
    if isinstance(written, list):
        return [put_together(item, tensors) for item in written]
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _TUPLE:
        return tuple(put_together(item, tensors) for item in content)
    return {key: put_together(value, tensors) for key, value in content}
