"""Values and shapes that only a real run could know: plausible values, and the largest shapes.

A value that depends on weights or activations is taken for 1 in every element. So ``loss.item()`` is 1.0, and a
predicate such as ``isnan(loss)``, ``norm > 1`` or ``isfinite(x).all()`` is what it is for ones. A shape that depends on
such values (``nonzero``, a mask that selects, ``nms``) is the largest that it can be: bytes are then an upper bound.
Checks that all of a tensor's elements are valid, as torch's distributions have, pass, and no factorization fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_map

from actbench.errors import UntraceableError
from actbench.simulator import known
from actbench.simulator.fake import LARGEST_REAL_BYTES
from actbench.simulator.recalled import RecallingMode, tensors_of
from actbench.tools.script import bounds

aten = torch.ops.aten

_NAME = "_actbench_plausible"
"""The attribute of a fake tensor whose values nobody knows: what all of them are taken for, if not for 1."""

_SAME = frozenset(
    getattr(aten, name)
    for name in (
        *("_to_copy", "view", "reshape", "select", "squeeze", "unsqueeze", "stack", "cat", "clone", "detach", "alias"),
        *("slice", "expand", "transpose", "permute", "t", "unbind", "index"),
    )
)
"""Operators whose result has the values of their first argument."""

_PREDICATES = frozenset(
    getattr(aten, name)
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "any", "all", "isnan", "isinf", "isposinf", "isneginf", "signbit"),
        *("logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "mul"),
    )
)
"""Operators whose truth values follow from plausible arguments."""

_ALL_VALID = aten._is_all_true
"""What distributions and ``torch._check_tensor_all`` ask for: whether a check holds for each element."""

_FACTORIZE = frozenset(
    getattr(aten, f"{name}_ex").default
    for name in ("linalg_cholesky", "linalg_inv", "linalg_ldl_factor", "linalg_lu_factor")
)
"""Operators whose last result tells of each matrix whether it could be factorized: 0 if so."""

_DECIDED = {
    **dict.fromkeys((aten.bitwise_or.Tensor, aten.logical_or.default), True),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), False),
}
"""Operators whose result is this truth value where one argument is, whatever the other is."""

_CHECKS_FINITE = aten._amp_foreach_non_finite_check_and_unscale_.default

_NO_BOUND = (
    "{} returns a shape that depends on values, and a simulated run has none; run it with --meter cuda or, if it is "
    "small, with --meter cpu"
)

_disabled: Any = torch._C._DisableTorchDispatch


class ScriptMode(RecallingMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode for a whole training script.

    Args:
        at_most: Told what makes the bytes an upper bound.
    """

    def __init__(self, at_most: Callable[[str], object]) -> None:
        super().__init__()
        self._at_most = at_most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what truth values in its result are taken for."""
        if func is _CHECKS_FINITE:
            return self._all_finite(func, types, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # torch tags no operator of a library so
            found = known.computed(func, args, kwargs or {})
            result = self.unknown(func, args, kwargs or {}) if found is None else known.made_fake(self, found)
        if func in bounds.BOUNDING:
            bounds.bound(func, args, result)
        if func in _DECIDED and known.NAME not in vars(result):
            _decide(func, args, result)
        elif func in _FACTORIZE:
            with _disabled():
                known.keep(result[-1], torch.zeros(result[-1].shape, dtype=result[-1].dtype))
        if type(result) is FakeTensor and known.NAME not in vars(result) and not func._schema.is_mutable:
            found = _taken_for(func, args, kwargs or {}, result)
            if found is not None:
                vars(result)[_NAME] = found
        return result

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        """Make a real tensor fake; a small one keeps its values, unless it is trained."""
        made = super().from_tensor(tensor, **options)
        if made is not tensor and not tensor.requires_grad and known.NAME not in vars(made):
            known.keep(made, tensor)
        return made

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a plausible value, or a result of the largest shape; an UntraceableError for other operators.

        NotImplemented for an operator whose arguments decide that no value is needed.
        """
        match func._schema.name:
            case "aten::_local_scalar_dense" | "aten::item":  # the second in inference mode
                return plausible(args[0])
            case "aten::equal":
                return args[0].shape == args[1].shape
            case "aten::allclose":
                return True
            case "aten::index":
                return self._by_masks(args)
        largest = _LARGEST.get(func._schema.name)
        if largest is None:
            raise UntraceableError(_NO_BOUND.format(func._schema.name))
        self._at_most(func._schema.name)
        with self:
            return largest(*args, **kwargs)

    def _by_masks(self, args: Any) -> Any:
        """Select by index what a mask of unknown values selects: all elements."""
        if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            return NotImplemented
        with self:
            return aten.index.Tensor(args[0], list(_as_indices(args[1])))

    def _all_finite(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Check gradients, which nobody knows, for infinity: none is found, so no step is left out."""
        found = known.value_of(args[1])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if found is not None and isinstance(args[1], FakeTensor):
            known.keep(args[1], found)
        return result


def _as_indices(indices: Any) -> Iterator[Any]:
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            yield from aten.nonzero.default(index).unbind(1)
        else:
            yield index


def _indices(count: int, *more: int) -> Tensor:
    return torch.empty((count, *more), dtype=torch.int64)


def _unique(x: Tensor, _: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    inverse = _indices(*x.shape) if return_inverse or return_counts else _indices(0)
    below = bounds.below(x)
    most = x.numel() if below is None else min(x.numel(), below)
    return x.new_empty(most), inverse, _indices(most if return_counts else 0)


def _unique_rows(x: Tensor, dim: int, _: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    count = x.shape[dim]
    return x.new_empty(x.shape), _indices(count if inverse else 0), _indices(count if counts else 0)


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return a count of each integer that there can be; if nobody knows the largest, of as many as are asked for."""
    length = max(bounds.below(x) or 0, minlength)
    if not length:
        raise UntraceableError(_NO_BOUND.format("aten::bincount"))
    return _indices(length) if weights is None else weights.new_empty(length)


def _selected(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())  # type: ignore[no-untyped-call]


_LARGEST: dict[str, Callable[..., Any]] = {
    "aten::nonzero": lambda x: _indices(x.numel(), x.dim()),
    "aten::masked_select": _selected,
    "aten::_unique2": _unique,
    "aten::bincount": _counts,
    "aten::unique_dim": _unique_rows,
    "aten::unique_consecutive": lambda x, inverse=False, counts=False, dim=None: _unique(x, True, inverse, counts),
    "torchvision::nms": lambda boxes, scores, threshold: _indices(boxes.shape[0]),
}
"""Operators whose results have a largest shape, by name."""


def plausible(tensor: Tensor) -> Any:
    """Return what each element of a tensor is taken for, as a number of its type; a known one's only value.

    Unknown truth values count as False.
    """
    value = known.value_of(tensor)
    if value is not None and value.numel() == 1:
        with _disabled():
            return value.item()
    with _disabled():
        return torch.full((), vars(tensor).get(_NAME, tensor.dtype is not torch.bool), dtype=tensor.dtype).item()


def values(tensor: Tensor) -> Tensor:
    """Return a real tensor of the known or plausible values of a tensor."""
    value = known.value_of(tensor)
    if value is not None:
        return value
    with _disabled():
        return torch.full(tensor.shape, plausible(tensor), dtype=tensor.dtype)


def real_if_known(tensor: Tensor) -> Tensor:
    """Return a small tensor in host memory, whose values are known, as a real one; another as it is."""
    value = known.value_of(tensor)
    most_bytes = LARGEST_REAL_BYTES if tensor.is_floating_point() else known.MOST_BYTES
    if value is None or tensor.requires_grad or tensor.nbytes > most_bytes:
        return tensor
    with _disabled():
        return value.clone()


def _taken_for(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> float | None:
    """Return what the unknown values of a result are taken for; None for 1.

    Truth values are those of ones. Shares of a whole, as softmax returns, are equal: ``numpy.random.choice`` draws by
    them, and checks that their sum is 1.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet in _SAME:
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        return vars(first).get(_NAME) if result.dtype is not torch.bool else bool(plausible(first))
    if result.dtype is torch.bool:
        return True if packet is _ALL_VALID else _evaluated(func, args, kwargs) if packet in _PREDICATES else None
    if packet is aten.max and not result.is_floating_point() and (below := bounds.below(args[0])) is not None:
        return below - 1
    if packet in (aten._softmax, aten._log_softmax) and result.dim():
        share = 1 / max(result.shape[args[1]], 1)
        return share if packet is aten._softmax else math.log(share)
    return math.exp(vars(args[0])[_NAME]) if packet is aten.exp and _NAME in vars(args[0]) else None


def _evaluated(func: Any, args: Any, kwargs: Any) -> bool:
    """Return what a predicate is for plausible arguments, each one element."""
    if not any(isinstance(each, FakeTensor) for each in tensors_of((args, kwargs))):
        return False

    def one(value: Any) -> Any:
        return torch.full((1,), plausible(value), dtype=value.dtype) if isinstance(value, Tensor) else value

    with _disabled():
        if func.overloadpacket in (aten.any, aten.all):
            return bool(one(args[0]).any())
        return bool(func(*tree_map(one, args), **tree_map(one, kwargs)).any())


def _decide(func: Any, args: Any, result: FakeTensor) -> None:
    """Keep the values of a result that one argument decides: ``is_at_its_end | is_end_token`` ends a generation."""
    for truth in args:
        value = known.value_of(truth)
        if value is not None and value.dtype is torch.bool and value.shape == result.shape:
            with _disabled():
                if bool((value if _DECIDED[func] else ~value).all()):
                    known.keep(result, value.to(result.dtype))


def _format(tensor: Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if not tensor.dim() else object.__format__(tensor, spec)


def _numpy(tensor: Tensor, *, force: bool = False) -> Any:
    if not force and tensor.requires_grad:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    if not force and tensor.is_cuda:
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    with _disabled():
        return values(tensor).detach().numpy().copy()


READERS: dict[str, Callable[..., Any]] = {
    "__format__": _format,
    "numpy": _numpy,
    "__array__": lambda tensor, dtype=None, copy=None: _numpy(tensor).astype(dtype or _numpy(tensor).dtype),
    "tolist": lambda tensor: values(tensor).tolist(),
}
"""Methods of fake tensors that read values."""
