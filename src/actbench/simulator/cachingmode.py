"""A fake tensor mode that caches the result of an operator for arguments of equal signature.

A step runs the same operators on the same shapes in every block, pass and trace. torch's mode has a cache too, but most
of a simulated step goes into the keys of this cache and the attributes of the tensors that it makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from actbench import slowsteps
from actbench.ops import hostmemory, noise  # noqa: F401  (they define operators that are named below)
from actbench.simulator import foreach, known, products
from actbench.simulator.forms import FORMS
from actbench.simulator.opcache import PLAIN, CachedResult, NewTensor, cached_result, is_plain, shared, signature

_internals: Any = torch._C
_NEVER = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
"""Tags of operators whose results depend on values, or that change the shape of an argument."""

_OF_VALUES = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
"""Tags of operators that look at values."""

_LIFTS = frozenset(("aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"))
"""Operators that may return a tensor whose value torch's mode knows."""

_aten = torch.ops.aten
_OF_METADATA = frozenset(getattr(torch.ops.actbench, name).default for name in ("to_host", "from_host", "fresh_seed"))
"""Operators of ours that no compiler may order or leave out, but whose results have the shapes of their arguments."""

_ROWS = frozenset((_aten.select.int, _aten.select_backward.default))
"""Operators of one row, whose results have the same form for every row: loops over tokens run them."""

_RELATIVE = frozenset(
    overload
    for packet in (
        *(_aten.alias, _aten.detach, _aten.expand, _aten.permute, _aten.select, _aten.slice, _aten.split),
        *(_aten.squeeze, _aten.t, _aten.transpose, _aten.unbind, _aten.unsqueeze, _aten.view),
    )
    for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
    if overload is not _aten.view.dtype
)
"""Views whose distance from the beginning of their argument does not depend on where that begins in its storage."""

_DEVICE = torch.ops.prim.device.default
_PINS = (_aten._pin_memory.default, _aten.is_pinned.default)
_UNSEEN = object()

OpCache: TypeAlias = "dict[tuple[Any, ...], CachedResult | None]"
"""How to make the result of an operator, by operator and arguments; None for one that must run each time."""

_begun_with: ContextVar[OpCache | None] = ContextVar("_begun_with", default=None)


@contextmanager
def starting_from(cache: OpCache) -> Iterator[None]:
    """Start new modes of the block from a cache, to which they add."""
    token = _begun_with.set(cache)
    try:
        yield
    finally:
        _begun_with.reset(token)


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


def device_of(args: Any, kwargs: Any) -> torch.device:
    """Return where an operator makes its result: where it is asked to, or where its first tensor is."""
    asked = kwargs.get("device")
    return asked or next((tensor.device for tensor in tensors_of((args, kwargs))), torch.device("cpu"))


def _collect(values: Any, found: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, list | tuple):
        for value in values:
            _collect(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            _collect(value, found)


class CachingFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes real tensors of a model fake, and caches results of operators on fake tensors.

    Arguments have equal signatures if their plain values are equal, their tensors have equal shapes, strides, offsets,
    dtypes, devices and bytes of storage, and they share storages in the same way. A result is cached if it consists of
    tensors with storages of their own, views of arguments, arguments themselves and plain values. Operators that look
    at values always run. So do operators of other libraries, as their fake forms may depend on anything.

    A mode starts with an empty cache, or with that of :func:`starting_from`.

    Products of tensors of two dtypes are refused, as real operators do.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # torch's cache walks over each of hundreds of tensors of a foreach operator, which are cached here
        self.cache_enabled = False
        begun_with = _begun_with.get()
        self._known = {} if begun_with is None else begun_with
        self._eligible: dict[Any, bool] = {}
        self._scalars: dict[tuple[torch.dtype, torch.device], NewTensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation: nothing is compiled on fake tensors."""
        return False

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this mode: a copy of a tensor belongs to the mode of the tensor, and needs no copy of all results."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the cached result of an operator, or run it; a ModelError for a product of tensors of two dtypes."""
        if asks_device(func, args):
            return args[0].device
        if func in _PINS:  # no driver locks pages here, and the bytes are the same
            return args[0] if func is _aten._pin_memory.default else False
        slowsteps.operator_ran(args)
        if func is _aten.lift_fresh.default and args[0].dim() == 0 and type(args[0]) is Tensor:
            return self._scalar(args[0])
        kwargs = kwargs or {}
        if not _OF_VALUES.isdisjoint(func.tags):
            found = known.computed(func, args, kwargs)
            if found is not None:
                return known.made_fake(self, found, device_of(args, kwargs))
            func, args = known.without_masks(func, args)
            # without masks it may be another operator, which looks at no values
            has_form = func in FORMS or _OF_VALUES.isdisjoint(func.tags)
            guessed = NotImplemented if has_form else self.unknown(func, args, kwargs)
            if guessed is not NotImplemented:
                return guessed
        tensors: list[FakeTensor] = []
        key = self._key(func, args, kwargs, tensors)
        make: Any = None if key is None else self._known.get(key, _UNSEEN)
        if make is not None and make is not _UNSEEN:
            return known.followed(func, args, kwargs, make(self, tensors, _before_row(func, args)), tensors)
        if func in products.PRODUCTS:
            products.check_one_type(func, args)
        result = self._run(func, types, args, kwargs, None if key is None else foreach.few(func, args))
        if key is not None and make is _UNSEEN:
            # an operator such as resize_ leaves its argument in another form, which a cached result does not make
            changed = func._schema.is_mutable and self._key(func, args, kwargs, []) != key
            self._known[key] = None if changed else cached_result(result, tensors, _before_row(func, args))
        return known.followed(func, args, kwargs, result, tensors)

    def _scalar(self, value: Tensor) -> Any:
        """Return a fake scalar that knows its value, as torch's mode makes one in eight times the time.

        Optimizers make one for each parameter.
        """
        make = self._scalars.get((value.dtype, value.device))
        if make is None:
            first: Any = super().__torch_dispatch__(_aten.lift_fresh.default, (), (value,), {})
            if first.constant is not None and not value.is_meta:
                self._scalars[value.dtype, value.device] = NewTensor.of(first, None, 0)
            return first
        made = make(self, (), 0)
        # the clone is a real tensor, which a mode would make fake
        with _internals._DisableTorchDispatch():
            constant = made.constant = value.clone()
            # torch notes what item() returns of integers and of float64
            made.item_memo = constant.item() if make.attributes["_item_memo"] is not None else None
        converter = self.fake_tensor_converter
        converter.set_tensor_memo(constant, made)  # an operator that overwrites the value returns this very tensor
        converter.add_constant_storage_mapping(made)  # and what is written to it may make the value unknown
        return made

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, few: foreach.Few | None) -> Any:
        if func in FORMS:
            with self:
                return FORMS[func](*args, **kwargs)
        if few is not None:
            result = few.spread(super().__torch_dispatch__(func, types, few.args, kwargs))
            if result is not NotImplemented:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that looks at unknown values; NotImplemented to run it anyway."""
        return NotImplemented

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        """Make a tensor fake that is not yet; a small real one of integers or booleans keeps its values.

        So does a small part of a large one, such as a batch of the tokens in a file.
        """
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self:
            return tensor  # torch 2.11 would make another, of unknown values
        made = super().from_tensor(tensor, **options)
        if not isinstance(tensor, FakeTensor) and not tensor.is_floating_point():
            is_part = tensor.nbytes <= known.MOST_BYTES < tensor.untyped_storage().nbytes()
            # the clone is a real tensor, which a mode would make fake
            with _internals._DisableTorchDispatch():
                known.keep(made, tensor.clone() if is_part else tensor)
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
        # without dtype= and device= operators go by the defaults, which a script may change
        key: list[Any] = [func, torch.get_default_dtype(), _internals._get_default_device(), *kwargs]
        described = args if not _is_row(func, args) else args[:-1]
        if not (self._describe(described, key, tensors) and self._describe(kwargs.values(), key, tensors)):
            return None
        key += shared([id(tensor.untyped_storage()) for tensor in tensors]) + shared([*map(id, tensors)])
        if func.is_view and func not in _RELATIVE:
            key += [tensor.storage_offset() for tensor in tensors]
        return tuple(key)

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: list[FakeTensor]) -> bool:
        """Add values to a key, and the tensors among them to a list; return whether the key can hold them all."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or not is_plain(value):
                    return False
                key += signature(value)
                tensors.append(value)
            elif kind in PLAIN:
                # 1, 1.0 and True are equal and have one hash, but not one result
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


def _is_row(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator of one row names its row by a number in range."""
    if func not in _ROWS or [type(arg) for arg in args] != [
        FakeTensor,
        *([int, int] if func is _aten.select.int else [list, int, int]),
    ]:
        return False
    shape, dim = (args[0].shape if func is _aten.select.int else args[1]), args[-2]
    return bool(-len(shape) <= dim < len(shape) and 0 <= args[-1] < shape[dim])


def _before_row(func: Any, args: Sequence[Any]) -> int:
    """Return the elements of a storage between the beginning of an argument and the row that is selected from it."""
    return args[2] * args[0].stride(args[1]) if func is _aten.select.int and _is_row(func, args) else 0
