"""How many elements of a tensor are 1, and how many of its views and parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actbench.simulator import known

NAME = "_actbench_ones"
"""The attribute of a fake tensor of which this is known."""

_disabled: Any = torch._C._DisableTorchDispatch


class Ones(NamedTuple):
    """How many elements of a tensor are 1 or true, where all others are 0.

    Attributes:
        number: At most so many, or, if ``is_share``, as many as equal shares are.
        dim: The dimension along which they are shared equally; None if it is not known where they are.
        is_share: Whether other values might have more.
    """

    number: int
    dim: int | None = None
    is_share: bool = False


def shares(count: int, among: int) -> list[int]:
    """Return equal shares of a number, the larger ones first, that add up to it."""
    return [count // among + (place < count % among) for place in range(among)]


def ones(tensor: Tensor) -> Ones | None:
    """Return how many elements of a tensor are 1 or true; None if that is not known, or if it has other values."""
    value = known.value_of(tensor)
    if value is None:
        return vars(tensor).get(NAME)
    with _disabled():
        is_mask = value.dtype is torch.bool or not value.numel() or (value.min() >= 0 and value.max() <= 1)
        return Ones(int(value.count_nonzero())) if is_mask else None


def forget(tensor: Tensor) -> None:
    """Forget what is known of a tensor whose elements were written."""
    vars(tensor).pop(NAME, None)


def _moved(x: Tensor, place: Callable[[int], int | None]) -> Ones | None:
    """Return the same of a tensor whose dimension ``dim`` is now at ``place(dim)``; None if it is gone."""
    found = ones(x)
    return found and found._replace(dim=None if found.dim is None else place(found.dim))


def permuted(x: Tensor, dims: Sequence[int]) -> Ones | None:
    """Return what is known of a tensor with its dimensions in another order."""
    return _moved(x, [dim % x.dim() for dim in dims].index)


def transposed(x: Tensor, first: int = 0, second: int = 1) -> Ones | None:
    """Return what is known of a tensor with two dimensions exchanged."""
    first, second = first % max(x.dim(), 1), second % max(x.dim(), 1)
    return _moved(x, lambda dim: {first: second, second: first}.get(dim, dim))


def squeezed(x: Tensor, dims: Any = None) -> Ones | None:
    """Return what is known of a tensor without dimensions of one element."""
    asked = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % max(x.dim(), 1) for dim in asked if x.shape[dim] == 1} if x.dim() else set()
    return _moved(x, lambda each: None if each in gone else each - sum(dim < each for dim in gone))


def unsqueezed(x: Tensor, dim: int) -> Ones | None:
    """Return what is known of a tensor with one dimension more."""
    at = dim % (x.dim() + 1)
    return _moved(x, lambda each: each + (each >= at))


def viewed(x: Tensor, shape: Sequence[int] | torch.dtype) -> Ones | None:
    """Return the same of a view; the dimension is found again by the elements before it."""
    if isinstance(shape, torch.dtype):
        return None
    known_size = -math.prod(shape) if -1 in shape else 0
    sizes = [x.numel() // known_size if known_size and size == -1 else size for size in shape]

    def place(dim: int) -> int | None:
        before = math.prod(x.shape[:dim])
        dims = (each for each in range(len(sizes)) if math.prod(sizes[:each]) == before)
        return next((each for each in dims if sizes[each] == x.shape[dim]), None)

    return _moved(x, place)


def selected(x: Tensor, dim: int = 0, place: Any = 0) -> Ones | None:
    """Return how many elements of a slice are true: its share, or all that there are."""
    found, dim = ones(x), dim % max(x.dim(), 1)
    if found is None:
        return None
    if found.dim != dim:
        after = None if found.dim is None else found.dim - (found.dim > dim)
        return found._replace(dim=after)
    number = int(place) % x.shape[dim] if isinstance(place, int) else 0
    return Ones(shares(found.number, x.shape[dim])[number], None, found.is_share)


def sliced(x: Tensor, dim: int = 0, begin: int | None = None, end: int | None = None, step: int = 1) -> Ones | None:
    """Return how many elements of a part are true: its share, or all that there are."""
    found, dim = ones(x), dim % max(x.dim(), 1)
    if found is None or found.dim != dim:
        return found
    return found._replace(number=sum(shares(found.number, x.shape[dim])[begin:end:step]))


def indexed(x: Tensor, indices: Sequence[Any]) -> Ones | None:
    """Return how many elements are true in the parts of a tensor that integers choose: equal shares."""
    found = ones(x)
    if found is None or found.dim != 0 or len(indices) != 1 or indices[0] is None or indices[0].dtype is torch.bool:
        return None
    parts, each = indices[0].numel(), shares(found.number, x.shape[0])
    return Ones(sum(each[place % len(each)] for place in range(parts)), 0 if indices[0].dim() else None, found.is_share)
