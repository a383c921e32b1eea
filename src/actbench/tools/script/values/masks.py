"""How many elements of a mask of unknown values are true, where more is known than its size.

A mask that is set at k places has at most k true elements: samplers of detectors keep so many of thousands of regions.
Of integers below n, as a router chooses among n experts, each number is taken to have an equal share: so masks of all n
choose each element once. What is counted of them, by sums and by histograms, adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.simulator import known
from actbench.tools.script.values import bounds
from actbench.tools.script.values.ones import (
    NAME,
    Ones,
    indexed,
    ones,
    permuted,
    selected,
    shares,
    sliced,
    squeezed,
    transposed,
    unsqueezed,
    viewed,
)

aten = torch.ops.aten

_disabled: Any = torch._C._DisableTorchDispatch


def keep_counts(counts: Tensor, count: int, among: int) -> None:
    """Let the first of unknown ``counts`` be equal shares of ``count`` elements, and the others 0."""
    told = [*shares(count, among), *(counts.numel() - among) * [0]]
    _keep(counts, torch.tensor(told, dtype=counts.dtype))


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note what is known of the result of an operator that writes nothing."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _SUMS:
        _sum(args[0], args[1] if len(args) > 1 else kwargs.get("dim"), result)
    elif packet is aten.histc and type(result) is FakeTensor:
        keep_counts(result, args[0].numel(), result.numel())
    elif (rule := _RULES.get(packet)) is not None and not _is_known(result):
        found = rule(*args)
        if packet is aten.unbind:
            for each in result:
                _note(each, found)
        else:
            _note(result, found)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], None] | None:
    """Return what notes, after an operator has written to its first argument, what is known of it then."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _COUNTS:
        return _counted(*args[:4])
    rule = _WRITES.get(packet)
    found = None if rule is None else rule(*args[:4])
    return None if found is None else lambda: _note(args[0], found)


def _is_known(result: Any) -> bool:
    first = result[0] if isinstance(result, list | tuple) and result else result
    return known.value_of(first) is not None


def _note(tensor: Any, found: Ones | None) -> None:
    if found is not None and type(tensor) is FakeTensor and known.value_of(tensor) is None:
        vars(tensor)[NAME] = found._replace(number=min(found.number, tensor.numel()))


def _keep(tensor: Tensor, value: Tensor) -> None:
    if type(tensor) is FakeTensor and known.value_of(tensor) is None:
        known.keep(tensor, value)


def _equal(x: Any, y: Any) -> Ones | None:
    """Return how many elements of integers are equal to a number, or to one of several different ones."""
    if isinstance(x, Tensor) and known.value_of(x) is not None:
        x, y = y, x
    value = y if isinstance(y, int) else known.value_of(y) if isinstance(y, Tensor) else None
    if not isinstance(x, Tensor) or value is None or x.is_floating_point():
        return None
    among = bounds.choices(x)
    if isinstance(value, int) or value.numel() == 1:
        if among is None:
            return None
        number = int(value)
        return Ones(shares(x.numel(), among)[number] if 0 <= number < among else 0, is_share=True)
    with _disabled():
        is_different = len(set(value.flatten().tolist())) == value.numel()
        is_all = value.numel() == among and bool(value.min() == 0) and bool(value.max() == among - 1)
    shape = torch.broadcast_shapes(x.shape, value.shape)  # type: ignore[no-untyped-call]
    if not is_different or math.prod(shape) != x.numel() * value.numel():
        return None
    dim = len(shape) - value.dim() + max(range(value.dim()), key=lambda each: value.shape[each])
    return Ones(x.numel(), dim if is_all else None, is_share=is_all)


def _same(x: Tensor, *_: Any) -> Ones | None:
    return ones(x)


def _above(x: Tensor, limit: Any, *_: Any) -> Ones | None:
    return ones(x) if _number(limit) == 0 else None


def _at_least(x: Tensor, limit: Any, *_: Any) -> Ones | None:
    return ones(x) if _number(limit) == 1 else None


def _either(x: Any, y: Any, *_: Any) -> Ones | None:
    """Return how many elements are true in one of two masks."""
    found = _of_alike(x, y)
    if len(found) < 2:
        return None
    first, second = found
    return Ones(first.number + second.number, None, first.is_share or second.is_share)


def _both(x: Any, y: Any, *_: Any) -> Ones | None:
    """Return how many elements are true in two masks: no more than in either; a product has to be one of masks."""
    found = _of_alike(x, y)
    if len(found) < 2 and not all(isinstance(each, Tensor) and each.dtype is torch.bool for each in (x, y)):
        return None
    return min(found, key=lambda each: each.number)._replace(dim=None) if found else None


def _of_alike(x: Any, y: Any) -> list[Ones]:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape):
        return []
    return [found for found in map(ones, (x, y)) if found is not None]


def _together(tensors: Sequence[Tensor], *_: Any) -> Ones | None:
    found = [each for each in map(ones, tensors) if each is not None]
    if len(found) < len(tensors):
        return None
    return Ones(sum(each.number for each in found), None, any(each.is_share for each in found))


def _sum(x: Tensor, dims: Any, result: Any) -> None:
    """Keep the counts of a mask, of the whole or along the dimension in which they are equal."""
    found = ones(x) if type(result) is FakeTensor else None
    if found is None:
        return
    summed = {dim % max(x.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims or range(x.dim()))}
    left = set(range(x.dim())) - summed
    with _disabled():
        if not left:
            _keep(result, torch.full(result.shape, found.number, dtype=result.dtype))
        elif left == {found.dim} and result.dim() == 1:
            keep_counts(result, found.number, result.numel())


def _put(x: Tensor, indices: Sequence[Any], value: Any, *_: Any) -> Ones | None:
    """Return how many elements are true after some were set, those of positions that tensors of integers name."""
    places = [each for each in indices if each is not None]
    if any(each.dtype in (torch.bool, torch.uint8) for each in places):
        return None
    rows = math.prod(torch.broadcast_shapes(*(each.shape for each in places)))  # type: ignore[no-untyped-call]
    rest = math.prod(x.shape) // max(math.prod(x.shape[at] for at, each in enumerate(indices) if each is not None), 1)
    return _set(x, rows * rest, value)


def _filled(x: Tensor, dim: int, index: Tensor, value: Any) -> Ones | None:
    return _set(x, index.numel() * (x.numel() // max(x.shape[dim], 1)), value) if x.dim() else None


def _scattered(x: Tensor, dim: int, index: Tensor, value: Any) -> Ones | None:
    found = _set(x, index.numel(), value)
    if found is not None and found.number == index.numel() and bounds.choices(index) == x.shape[dim]:
        return Ones(found.number, dim % x.dim(), is_share=True)
    return found


def _set(x: Tensor, count: int, value: Any) -> Ones | None:
    found = ones(x)
    value = _number(value)
    if found is None or value is None or (value != 1 and x.dtype is not torch.bool):
        return found if value == 0 else None
    return Ones(found.number + (count if value else 0), None, found.is_share)


def _number(value: Any) -> Any:
    """Return a value, or the one that all elements of a tensor have; None if they differ, or are unknown."""
    if not isinstance(value, Tensor):
        return value
    found = ones(value)
    if found is not None and found.number in (0, value.numel()):
        return int(found.number > 0)
    told = known.value_of(value)
    with _disabled():
        return told.item() if told is not None and told.numel() == 1 else None


def _counted(x: Tensor, dim: int, index: Tensor, added: Any) -> Callable[[], None] | None:
    """Return what keeps the counts of chosen numbers, where ones are added at their places."""
    found, among = ones(x), bounds.choices(index)
    if found is None or found.number or among is None or x.dim() != 1 or among > x.numel() or _number(added) != 1:
        return None

    def note() -> None:
        if type(x) is FakeTensor:
            keep_counts(x, index.numel(), among)
        else:
            with _disabled():  # it is in host memory: operators on tensors without values write nothing to it
                x[:among] += torch.tensor(shares(index.numel(), among), dtype=x.dtype)

    return note


_SUMS = (aten.sum, aten.count_nonzero)
_COUNTS = (aten.scatter_add_, aten.index_add_)
_WRITES: dict[Any, Callable[..., Ones | None]] = {
    aten.index_put_: _put,
    aten.index_fill_: _filled,
    aten.scatter_: _scattered,
}
"""Operators that set elements of their first argument."""


def _all(rule: Callable[..., Ones | None], *names: str) -> Iterable[tuple[Any, Callable[..., Ones | None]]]:
    return ((getattr(aten, name), rule) for name in names)


_RULES: dict[Any, Callable[..., Ones | None]] = dict(
    (
        *_all(_same, "_to_copy", "clone", "detach", "alias", "contiguous", "lift_fresh"),
        *_all(_above, "gt", "ne"),
        *_all(_at_least, "ge"),
        *_all(_equal, "eq"),
        *_all(_either, "bitwise_or", "logical_or", "bitwise_xor", "logical_xor", "__or__"),
        *_all(_both, "bitwise_and", "logical_and", "mul", "__and__"),
        *_all(_together, "cat", "stack"),
        *_all(permuted, "permute"),
        *_all(transposed, "transpose", "t"),
        *_all(unsqueezed, "unsqueeze"),
        *_all(squeezed, "squeeze"),
        *_all(lambda *_: Ones(0), "zeros_like", "new_zeros"),
        *_all(lambda x, *_: Ones(x.numel()), "ones_like"),
        *_all(viewed, "view", "reshape", "_unsafe_view"),
        *_all(selected, "select", "unbind"),
        *_all(sliced, "slice"),
        *_all(indexed, "index"),
        *_all(_put, "index_put"),
        *_all(_filled, "index_fill"),
        *_all(_scattered, "scatter"),
    )
)
"""What is known of the results of operators that write nothing, by what is known of their arguments."""
