"""A fake tensor mode that runs an operator once for alike arguments, and then recalls its result.

A step runs the same operators on the same shapes in every block, pass and trace. torch's mode has a cache too, but most
of a simulated step goes into the keys of this cache and the attributes of the tensors that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from actbench import longsteps
from actbench.ops import hostmemory, noise
from actbench.simulator import known, products, rows

_internals: Any = torch._C
layout_of: Callable[[Tensor], torch.layout] = Tensor.layout.__get__  # type: ignore[attr-defined]
"""Returns a tensor's layout; for a fake tensor it skips the Python code of its class."""

_make_subclass: Callable[..., FakeTensor] = Tensor._make_subclass

Make = Callable[[Sequence[FakeTensor], int], Any]
"""From the tensors among an operator's arguments, and the elements before the row that it selects, to its result."""

_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Types of arguments that the key holds by value."""

_NEVER = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
"""Tags of operators whose results depend on values, or that change the shape of an argument."""

_OF_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
"""Tags of operators that look at values."""

_LIFTS = frozenset(("aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"))
"""Operators that may return a tensor whose value torch's mode knows."""

_aten = torch.ops.aten
_OF_METADATA = frozenset(
    getattr(torch.ops.actbench, operator.__name__).default
    for operator in (hostmemory.to_host, hostmemory.from_host, noise.fresh_seed)
)
"""Operators of ours that no compiler may order or leave out, but whose results have the shapes of their arguments."""

_DEVICE = torch.ops.prim.device.default
_UNSEEN = object()


def asks_device(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator asks for the device of a fake tensor, which needs no other mode.

    Autograd asks so often that two of three operators in a step are of this kind.
    """
    return func is _DEVICE and type(args[0]) is FakeTensor


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among arguments of an operator, or in its result."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, list | tuple):
        for value in values:
            _collect(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            _collect(value, found)


class RecallingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes real tensors of a model fake, and recalls results of operators on fake tensors.

    Arguments are alike if their plain values are equal, their tensors have equal shapes, strides, offsets, dtypes,
    devices and bytes of storage, and they share storages in the same way. A result is recalled if it consists of
    tensors with storages of their own, views of arguments, arguments themselves and plain values. Operators that look
    at values always run. So do operators of other libraries, as their fake forms may depend on anything.

    Products of tensors of two dtypes are refused, as real operators do.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # torch's cache walks over each of hundreds of tensors of a foreach operator, which is recalled here
        self.cache_enabled = False
        self._known: dict[tuple[Any, ...], Make | None] = {}
        self._eligible: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation: nothing is compiled on fake tensors."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Recall the result of an operator, or run it; a ModelError for a product of tensors of two dtypes."""
        if asks_device(func, args):
            return args[0].device
        longsteps.ran(args)
        kwargs = kwargs or {}
        if not _OF_VALUES.isdisjoint(func.tags):
            found = known.computed(func, args, kwargs)
            if found is not None:
                return known.made_fake(self, found)
            func, args = known.without_masks(func, args)
            guessed = NotImplemented if _OF_VALUES.isdisjoint(func.tags) else self.unknown(func, args, kwargs)
            if guessed is not NotImplemented:
                return guessed
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        make: Any = None if key is None else self._known.get(key, _UNSEEN)
        if make is not None and make is not _UNSEEN:
            return known.followed(func, args, kwargs, make(tensors, rows.before_row(func, args)), tensors)
        if func in products.PRODUCTS:
            products.check_one_type(func, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and make is _UNSEEN:
            changed = func._schema.is_mutable and self._key(func, args, kwargs, []) != key
            self._known[key] = None if changed else _recipe(result, tensors, rows.before_row(func, args))
        return known.followed(func, args, kwargs, result, tensors)

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that looks at values that nobody knows; NotImplemented to run it anyway."""
        return NotImplemented

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        """Make a tensor fake that is not yet; a small real one of integers or booleans keeps its values."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self:
            return tensor  # torch 2.11 would make another, whose values nobody knows
        made = super().from_tensor(tensor, **options)
        if not isinstance(tensor, FakeTensor) and not tensor.is_floating_point():
            known.keep(made, tensor)
        return made

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[FakeTensor]
    ) -> tuple[Any, ...] | None:
        """Return the key of a result, and collect the tensors found; None for an operator that always runs."""
        eligible = self._eligible.get(func)
        if eligible is None:
            eligible = self._eligible[func] = _is_eligible(func)
        if not eligible or torch.is_inference_mode_enabled():
            return None
        key: list[Any] = [func, torch.get_default_dtype(), _internals._get_default_device(), *kwargs]
        described = args if not rows.is_row(func, args) else args[:-1]
        if not (self._describe(described, key, tensors) and self._describe(kwargs.values(), key, tensors)):
            return None
        key += _shared([id(tensor.untyped_storage()) for tensor in tensors]) + _shared([*map(id, tensors)])
        if func.is_view and func not in rows.RELATIVE:
            key += [tensor.storage_offset() for tensor in tensors]
        return tuple(key)

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add values to a key, and the tensors among them to a list; return whether the key can hold them all."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or not _is_plain(value):
                    return False
                key += _form(value)
                tensors.append(value)
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(value, key, tensors):
                    return False
            else:
                return False
        return True


def _is_eligible(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or not _NEVER.isdisjoint(func.tags):
        return False
    if func.namespace == "actbench":
        return torch.Tag.pt2_compliant_tag in func.tags or func in _OF_METADATA
    return func.namespace in ("aten", "prims") and func._schema.name not in _LIFTS


def _is_plain(tensor: FakeTensor) -> bool:
    return layout_of(tensor) is torch.strided and getattr(tensor, "dispatch_keys", None) is None


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), *_form(tensor))


def _form(tensor: FakeTensor) -> tuple[Any, ...]:
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


def _shared(owners: list[int]) -> list[int]:
    """Return the first index of each owner, or an empty list if all owners are different."""
    if len(set(owners)) == len(owners):
        return []
    places: dict[int, int] = {}
    return [places.setdefault(owner, place) for place, owner in enumerate(owners)]


def _recipe(result: Any, tensors: Sequence[FakeTensor], before: int) -> Make | None:
    """Return a function that makes the result again from alike arguments, or None if there is none."""
    kind = type(result)
    parts = (
        [_part(leaf, tensors, before) for leaf in result] if kind in (list, tuple) else [_part(result, tensors, before)]
    )
    makes = [make for make in parts if make is not None]
    if len(makes) < len(parts) or _share_storages(result, tensors):
        return None
    if kind in (list, tuple):
        return lambda given, before: kind([make(given, before) for make in makes])
    return makes[0]


def _part(leaf: Any, tensors: Sequence[FakeTensor], before: int) -> Make | None:
    """Return a function that makes one tensor or plain value of a result again."""
    if type(leaf) in _PLAIN:
        return lambda given, before: leaf
    if type(leaf) is not FakeTensor or leaf.constant is not None or not _is_plain(leaf):
        return None
    for index, tensor in enumerate(tensors):
        if leaf is tensor:
            return lambda given, before: given[index]
    storage = leaf.untyped_storage()
    sources = [index for index, tensor in enumerate(tensors) if tensor.untyped_storage() is storage]
    first = int(leaf.storage_offset()) - before - (int(tensors[sources[0]].storage_offset()) if sources else 0)
    make = _twin(leaf, sources[0] if sources else None, first)
    return make if _is_alike(make(tensors, before), leaf) else None


def _twin(leaf: FakeTensor, source: int | None, first: int) -> Make:
    """Return a function that makes tensors like ``leaf``, over the storage of argument ``source`` or with a new one.

    It copies the attributes that torch's mode gives a tensor, in an eighth of the time that the mode takes.
    """
    shape, stride, dtype = leaf.shape, leaf.stride(), leaf.dtype
    device, attributes = leaf.fake_device, _attributes(leaf)
    on_host = source is None and hostmemory.is_host(leaf.untyped_storage())
    allows = leaf.fake_mode._allow_unsafe_data_ptr_access
    guard = _internals._set_warn_deprecated_on_mutable_data_ptr if allows else _internals._set_throw_on_mutable_data_ptr

    def twin(given: Sequence[FakeTensor], before: int) -> FakeTensor:
        with _internals._DisableTorchDispatch():
            if source is None:
                bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                bare = torch.empty(0, dtype=dtype, device="meta")
                offset = given[source].storage_offset() + first + before
                bare.set_(given[source].untyped_storage(), offset, shape, stride)
        made = _make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        guard(made)
        vars(made).update(attributes)
        if on_host:
            hostmemory.mark(made.untyped_storage())
        return made

    return twin


def _is_alike(made: FakeTensor, leaf: FakeTensor) -> bool:
    keys = _internals._dispatch_key_set
    return _metadata(made) == _metadata(leaf) and keys(made) == keys(leaf) and vars(made) == _attributes(leaf)


def _attributes(leaf: FakeTensor) -> dict[str, Any]:
    """Return the attributes that torch's mode gives a tensor; values are followed for each result anew."""
    return {name: value for name, value in vars(leaf).items() if name != known.NAME}


def _share_storages(result: Any, tensors: Sequence[FakeTensor]) -> bool:
    """Return whether two tensors of a result share a storage that no argument has."""
    leaves = [leaf for leaf in result if isinstance(leaf, Tensor)] if isinstance(result, list | tuple) else []
    distinct = {id(leaf): leaf.untyped_storage() for leaf in leaves}
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    own = [storage._cdata for storage in distinct.values() if storage._cdata not in given]
    return len(own) > len(set(own))
