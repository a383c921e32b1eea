"""Values of small fake tensors of integers and booleans, for code that reads them.

Models count image tokens, and split by sizes of pictures, by values. Such values are never computed from weights, so
each operator on them runs a second time, on real tensors that hold the values. These are no memory of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from actbench.errors import UntraceableError

MOST_BYTES = 64 * 2**20
"""Bytes of the largest storage of integers or booleans whose values are kept."""

MOST_FLOATING_BYTES = 64 * 2**10
"""The same for floats, which are kept only if they follow from integers."""

MOST_HELD_BYTES = 2**30
"""Bytes of all values that are held at once; only those of at most :data:`MOST_FLOATING_BYTES` are kept beyond.

Optimizers with 8-bit states make all of them before they write the first: of a model of 70B parameters 17 GiB of zeros.
"""

NAME = "_actbench_known"
"""The attribute of a fake tensor whose values are known."""

_most_floating_bytes: ContextVar[int] = ContextVar("_most_floating_bytes", default=MOST_FLOATING_BYTES)


@contextmanager
def floats_up_to(most_bytes: int) -> Iterator[None]:
    """Inside the block, keep the values of floats in storages of up to ``most_bytes``."""
    token = _most_floating_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_floating_bytes.reset(token)


_aten = torch.ops.aten
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
"""Operators whose results have no values yet; fake forms of others write no values into them."""

_HOST = torch.device("cpu")
_disabled: Any = torch._C._DisableTorchDispatch


class _Views(WeakSet["_Known"]):
    """The known values of the tensors that share a storage, whose bytes count as held until they are dropped."""

    held_bytes = 0
    """Bytes of all storages of known values."""

    def __init__(self, storage_bytes: int) -> None:
        super().__init__()
        self._bytes = storage_bytes
        type(self).held_bytes += storage_bytes

    def drop(self) -> None:
        """Drop the values of all of them."""
        for each in self:
            each.value = None
        type(self).held_bytes -= self._bytes  # the module's names are gone when Python ends
        self._bytes = 0

    __del__ = drop


class _Known:
    """The value of a fake tensor, until it is dropped."""

    __slots__ = ("__weakref__", "value", "views")

    def __init__(self, value: Tensor, views: _Views) -> None:
        self.value: Tensor | None = value
        self.views = views
        views.add(self)


def keep(fake: FakeTensor, value: Tensor, views: _Views | None = None) -> None:
    """Keep the value of a fake tensor, if it is small; that of a view of another (``views``) goes with the other's."""
    if value.device.type != "cpu" or not _may_be_kept(value):
        return
    if views is None and not _has_room(value):
        return
    vars(fake)[NAME] = _Known(value, _Views(value.untyped_storage().nbytes()) if views is None else views)


def value_of(tensor: Any) -> Tensor | None:
    """Return the value of a tensor, as a real tensor not to be changed; None if it is unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor if isinstance(tensor, Tensor) and type(tensor) is Tensor and not tensor.is_meta else None
    found: _Known | None = vars(tensor).get(NAME)
    return tensor.constant if found is None else found.value


def integers(tensor: Tensor, unknown: str) -> list[int]:
    """Return the values of a tensor of integers; an UntraceableError with the text ``unknown`` if they are unknown."""
    value = value_of(tensor)
    if value is None:
        raise UntraceableError(unknown)
    with _disabled():
        return [int(each) for each in value.reshape(-1)]


def forget(tensor: Any) -> None:
    """Forget the values of a tensor and its views."""
    found: _Known | None = vars(tensor).get(NAME) if isinstance(tensor, FakeTensor) else None
    if found is not None:
        found.views.drop()


def computed(func: Any, args: Any, kwargs: Any, *, has_run: bool = False) -> Any:
    """Return the result of an operator on known values; None if one of them is unknown.

    Where its fake form ``has_run``, sizes are those of the card: log_sigmoid saves no buffer, which the CPU's reads.
    """
    values, unknown = _values((args, kwargs))
    # seeds that schemes draw decide no shape, and to draw one is more than to compute it
    if unknown or (func.namespace != "aten" and torch.Tag.nondeterministic_seeded in func.tags):
        return None
    with _disabled():
        try:
            return func(*values[0], **values[1])
        except RuntimeError as error:  # of an operator that only the card has, or a type that the CPU does not compute
            text = str(error)
            is_of_cpu = isinstance(error, NotImplementedError) or "CPU" in text or "not implemented for" in text
            if is_of_cpu or (has_run and "must match the size" in text):
                return None
            raise


def followed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the result of an operator, with its values if they follow from those of ``tensors``, its arguments."""
    floats = type(result) is FakeTensor and result.dtype.is_floating_point
    if not floats or func._schema.is_mutable or any(NAME in vars(tensor) for tensor in tensors):
        _follow(func, args, kwargs, result)
    return result


def _follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Keep the values of what an operator returned, if they follow from known ones; forget values that it changed."""
    if func._schema.name in EMPTY:
        return
    writes = func._schema.is_mutable
    outputs = [leaf for leaf in _flat(result) if isinstance(leaf, FakeTensor)]
    if writes:
        if not _all_known((args, kwargs)):
            return
    else:
        # what has no room is not even computed: a heap with holes of this size grows as if it were kept
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if not any(_may_be_kept(each) and (is_view or _has_room(each)) for each in outputs):
            return
    found = computed(func, args, kwargs, has_run=True)
    if found is None:
        if writes:
            _forget(func, args, kwargs)
        return
    shared = {
        known.value.untyped_storage()._cdata: known.views
        for known in _all_known((args, kwargs))
        if known.value is not None
    }
    for output, value in zip(outputs, [leaf for leaf in _flat(found) if isinstance(leaf, Tensor)], strict=True):
        if NAME not in vars(output):
            keep(output, value, shared.get(value.untyped_storage()._cdata))


def _has_room(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= MOST_FLOATING_BYTES or _Views.held_bytes <= MOST_HELD_BYTES


def _may_be_kept(tensor: Tensor) -> bool:
    most = _most_floating_bytes.get() if tensor.is_floating_point() else MOST_BYTES
    return tensor.layout is torch.strided and not tensor.is_complex() and tensor.untyped_storage().nbytes() <= most


def _forget(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Forget the values that an operator changes in a way that is not followed."""
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for each in func._schema.arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            for known in _all_known(named.get(each.name)):
                known.views.drop()


def _flat(values: Any) -> list[Any]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in _flat(value)]
    return [leaf for value in values.values() for leaf in _flat(value)] if isinstance(values, dict) else []


def _all_known(values: Any) -> list[_Known]:
    return [vars(leaf)[NAME] for leaf in _flat(values) if isinstance(leaf, FakeTensor) and NAME in vars(leaf)]


def _values(values: Any) -> tuple[Any, bool]:
    """Return arguments with the values of their tensors, which are in host memory, and whether one is unknown.

    Each step of an optimizer asks for the value of each of its counters: torch's ``tree_map`` took a tenth of a case.
    """
    if isinstance(values, Tensor):
        found = value_of(values)
        return found, found is None
    if type(values) in (list, tuple):
        parts = [_values(each) for each in values]
        return type(values)(value for value, _ in parts), any(unknown for _, unknown in parts)
    if type(values) is torch.device:
        return _HOST, False
    if type(values) is dict:
        named = {name: _values(each) for name, each in values.items()}
        return {name: value for name, (value, _) in named.items()}, any(unknown for _, unknown in named.values())
    return values, False


def made_fake(mode: FakeTensorMode, result: Any, device: torch.device) -> Any:
    """Return a result of :func:`computed` with its tensors fake, on a device, and their values kept."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with mode:
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
        keep(made, leaf)  # type: ignore[arg-type]
        return made

    return tree_map(fake, result)


def without_masks(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return an operator and arguments that choose by index what these choose by masks whose values are known.

    That is what the operator does itself.
    """
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        func, args = _aten.index.Tensor, (args[0].expand(shape), [args[1].expand(shape)])
    if func is not _aten.index.Tensor:
        return func, args
    indices: list[Any] = []
    for index in args[1]:
        value = value_of(index) if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) else None
        with _disabled():
            indices += [index] if value is None else value.nonzero().unbind(1)
    return func, (args[0], indices)
