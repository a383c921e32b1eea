"""Cached results of operators: how to make a result again from arguments of equal signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from actbench.simulator import known

_internals: Any = torch._C
layout_of: Callable[[Tensor], torch.layout] = Tensor.layout.__get__  # type: ignore[attr-defined]
"""Returns a tensor's layout; for a fake tensor it skips the Python code of its class."""

_make_subclass: Callable[..., FakeTensor] = Tensor._make_subclass

CachedResult: TypeAlias = "Constant | Argument | Sequenced | NewTensor"
"""From a mode, an operator's tensors, and the elements before the row that it selects, to the operator's result.

It is data, so that another process can have it; see :mod:`actbench.simulator.sharedopcache`.
"""

PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that the key holds by value."""


def is_plain(tensor: FakeTensor) -> bool:
    """Return whether a tensor is strided, and dispatched as others are."""
    return layout_of(tensor) is torch.strided and getattr(tensor, "dispatch_keys", None) is None


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), *signature(tensor))


def signature(tensor: FakeTensor) -> tuple[Any, ...]:
    """Return all that an operator's result depends on of a tensor, except its place in its storage."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.fake_device,
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def shared(owners: list[int]) -> list[int]:
    """Return the first index of each owner, or an empty list if all owners are different."""
    if len(set(owners)) == len(owners):
        return []
    places: dict[int, int] = {}
    return [places.setdefault(owner, place) for place, owner in enumerate(owners)]


def cached_result(result: Any, tensors: Sequence[FakeTensor], before: int) -> CachedResult | None:
    """Return what makes the result again from arguments of equal signature, or None if nothing does."""
    if type(result) is torch.Size:
        return None
    # decompositions return named tuples, and operators plain ones
    several = list if type(result) is list else tuple if isinstance(result, tuple) else None
    given = _Given(tensors)
    parts = [_part(leaf, given, before) for leaf in (result if several else [result])]
    makes = [make for make in parts if make is not None]
    if len(makes) < len(parts) or _share_storages(result, tensors):
        return None
    return Sequenced(several, tuple(makes)) if several else makes[0]


class _Given:
    """The tensors among an operator's arguments, with the places of the first of each and of each storage."""

    def __init__(self, tensors: Sequence[FakeTensor]) -> None:
        self.tensors = tensors
        self.places: dict[int, int] = {}
        self.sources: dict[int, int] = {}
        for place, tensor in enumerate(tensors):
            self.places.setdefault(id(tensor), place)
            self.sources.setdefault(tensor.untyped_storage()._cdata, place)


def _part(leaf: Any, given: _Given, before: int) -> CachedResult | None:
    """Return what makes one tensor or plain value of a result again."""
    if type(leaf) in PLAIN:
        return Constant(leaf)
    if type(leaf) is not FakeTensor or leaf.constant is not None or not is_plain(leaf):
        # one that knows its value (FakeTensor.constant) would hand it on to every other
        return None
    place = given.places.get(id(leaf))
    if place is not None:
        return Argument(place)
    source = given.sources.get(leaf.untyped_storage()._cdata)
    first = int(leaf.storage_offset()) - before - (0 if source is None else int(given.tensors[source].storage_offset()))
    make = NewTensor.of(leaf, source, first)
    return make if has_equal_metadata(make(leaf.fake_mode, given.tensors, before), leaf) else None


class Constant(NamedTuple):
    """Returns a plain value."""

    value: Any

    def __call__(self, mode: FakeTensorMode, given: Sequence[FakeTensor], before: int) -> Any:
        """Return the value."""
        return self.value


class Argument(NamedTuple):
    """Returns a tensor among the arguments."""

    place: int

    def __call__(self, mode: FakeTensorMode, given: Sequence[FakeTensor], before: int) -> FakeTensor:
        """Return the tensor."""
        return given[self.place]


class Sequenced(NamedTuple):
    """Makes a list or a tuple."""

    kind: type[list[Any]] | type[tuple[Any, ...]]
    makes: tuple[CachedResult, ...]

    def __call__(self, mode: FakeTensorMode, given: Sequence[FakeTensor], before: int) -> Any:
        """Make its parts, and return them."""
        return self.kind([make(mode, given, before) for make in self.makes])


class NewTensor(NamedTuple):
    """Makes a tensor like the first result, over the storage of argument ``source`` or a new one.

    It copies the attributes that torch's mode gives a tensor, in an eighth of the time that the mode takes.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: int | None
    first: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, leaf: FakeTensor, source: int | None, first: int) -> Self:
        """Return what makes tensors like ``leaf``, ``first`` elements behind the beginning of argument ``source``."""
        layout = (leaf.shape, leaf.stride(), leaf.dtype, leaf.fake_device)
        return cls(*layout, source, first, _attributes(leaf))

    def __call__(self, mode: FakeTensorMode, given: Sequence[FakeTensor], before: int) -> FakeTensor:
        """Make a tensor of a mode."""
        with _internals._DisableTorchDispatch():
            # a FakeTensor is made of a meta tensor that is none itself
            if self.source is None:
                bare = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                bare = torch.empty(0, dtype=self.dtype, device="meta")
                source = given[self.source]
                offset = source.storage_offset() + self.first + before
                bare.set_(source.untyped_storage(), offset, self.shape, self.stride)
        # as in FakeTensor.__new__: a meta tensor that dispatches as one of the device, with no pointer to hand out
        made = _make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=self.device)
        if mode._allow_unsafe_data_ptr_access:
            _internals._set_warn_deprecated_on_mutable_data_ptr(made)
        else:
            _internals._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self.attributes, fake_mode=mode)
        return made


def has_equal_metadata(made: FakeTensor, leaf: FakeTensor) -> bool:
    """Return whether two tensors differ in nothing but their storages."""
    keys = _internals._dispatch_key_set
    return _metadata(made) == _metadata(leaf) and keys(made) == keys(leaf) and _attributes(made) == _attributes(leaf)


def _attributes(leaf: FakeTensor) -> dict[str, Any]:
    """Return the attributes that any mode gives a tensor; values are followed for each result anew."""
    return {name: value for name, value in vars(leaf).items() if name not in (known.NAME, "fake_mode")}


def _share_storages(result: Any, tensors: Sequence[FakeTensor]) -> bool:
    """Return whether two tensors of a result share a storage that no argument has."""
    leaves = [leaf for leaf in result if isinstance(leaf, Tensor)] if isinstance(result, list | tuple) else []
    distinct = {id(leaf): leaf.untyped_storage() for leaf in leaves}
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    own = [storage._cdata for storage in distinct.values() if storage._cdata not in given]
    return len(own) > len(set(own))
