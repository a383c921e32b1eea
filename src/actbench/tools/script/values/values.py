"""Values and shapes that only a real run could know: plausible values, and the largest shapes.

A shape that depends on such values (``nonzero``, a mask that selects, ``nms``) is the largest that it can be: bytes are
then an upper bound. Where several masks share the elements of one tensor
(:mod:`actbench.tools.script.values.masks`), it is an equal share. No factorization of a matrix fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from actbench.errors import UntraceableError
from actbench.simulator import known
from actbench.simulator.cachingmode import CachingFakeMode, device_of, tensors_of
from actbench.simulator.fake import LARGEST_REAL_BYTES
from actbench.simulator.places import is_card
from actbench.tools.script.values import bounds, masks, placeholders
from actbench.tools.script.values.ones import forget as forget_ones, ones

aten = torch.ops.aten

_FACTORIZE = frozenset(
    getattr(aten, f"{name}_ex").default
    for name in ("linalg_cholesky", "linalg_inv", "linalg_ldl_factor", "linalg_lu_factor")
)
"""Operators whose last result tells of each matrix whether it could be factorized: 0 if so."""

_HOST = torch.device("cpu")
_COPIES = aten._to_copy.default
_CHECKS_FINITE = aten._amp_foreach_non_finite_check_and_unscale_.default

_NO_BOUND = (
    "{} returns a shape that depends on values, and a simulated run has none; run it with --meter cuda or, if it is "
    "small, with --meter cpu"
)

_disabled: Any = torch._C._DisableTorchDispatch


class ScriptMode(CachingFakeMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode for a whole training script.

    Args:
        at_most: Told what makes the bytes an upper bound.
        shared: Told what makes them an estimate, by equal shares.
        waited: Called where the processor waits for values.
        chosen: The share of the largest shape that is taken where only a real run knows one.

    Attributes:
        is_over: Whether the simulation has ended: what asks for unknown values then is refused.
    """

    def __init__(
        self,
        at_most: Callable[[str], object],
        shared: Callable[[str], object],
        waited: Callable[[], object] = lambda: None,
        chosen: float = 1.0,
    ) -> None:
        super().__init__()
        self._at_most, self._shared, self._waited, self._chosen = at_most, shared, waited, chosen
        self.is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what the values in its result are taken for, and below what number they are."""
        if kwargs and kwargs.get("device") is not None:
            kwargs = _placed(func, kwargs)
        if func is _CHECKS_FINITE:
            return self._all_finite(func, types, args, kwargs)
        written = masks.written(func, args, kwargs or {}) if func._schema.is_mutable else None
        result = self._ran(func, types, args, kwargs)
        if func in _FACTORIZE:
            with _disabled():
                known.keep(result[-1], torch.zeros(result[-1].shape, dtype=result[-1].dtype))
        elif func._schema.is_mutable:
            _forget(args, kwargs or {})
            if written is not None:
                written()
        else:
            bounds.bound(func, args, kwargs or {}, result)
            masks.follow(func, args, kwargs or {}, result)
            placeholders.follow(func, args, kwargs or {}, result)
            if func is _COPIES and result.device.type == "cpu" and args[0].device.type == "cuda":
                if not (kwargs or {}).get("non_blocking"):
                    self._waited()
                return real_if_known(result)
        return result

    def _ran(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, whose result may depend on values."""
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # torch tags no operator of a library so
            found = known.computed(func, args, kwargs or {})
            if found is None:
                return self.unknown(func, args, kwargs or {})
            return known.made_fake(self, found, device_of(args, kwargs or {}))
        except RuntimeError as error:
            if "evice" not in str(error) or not _are_apart(args, kwargs or {}):
                raise
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when "
                f"checking arguments for {func._schema.name})"
            ) from error

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        """Make a real tensor fake; a small one keeps its values, unless it is trained."""
        made = super().from_tensor(tensor, **options)
        if made is not tensor and not tensor.requires_grad and known.NAME not in vars(made):
            known.keep(made, tensor)
        return made

    def unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a plausible value, or a result of the largest shape; an UntraceableError for other operators.

        NotImplemented for an operator whose arguments decide that no value is needed.

        Raises:
            UntraceableError: The simulation is over: who asks for a value now would take a made-up one for real.
        """
        if self.is_over:
            raise UntraceableError(_OVER)
        match func._schema.name:
            case "aten::_local_scalar_dense" | "aten::item":  # the second in inference mode
                if is_card(args[0].device):
                    self._waited()
                return placeholders.one(args[0])
            case "aten::equal":
                return args[0].shape == args[1].shape
            case "aten::allclose":
                return True
            case "aten::index":
                return self._by_masks(args)
        largest = _LARGEST.get(func._schema.name)
        if largest is None:
            raise UntraceableError(_NO_BOUND.format(func._schema.name))
        is_shared = _is_shared(func._schema.name, *args)
        (self._shared if is_shared else self._at_most)(func._schema.name)
        with self:
            found = largest(*args, **kwargs)
            return found if is_shared or func._schema.name not in _CHOOSES else self._some(found)

    def _some(self, chosen: Tensor) -> Tensor:
        """Return as many rows of the elements that an operator may choose as are taken to be chosen."""
        if self._chosen == 1.0:
            return chosen
        return chosen.new_empty(math.ceil(self._chosen * chosen.shape[0]), *chosen.shape[1:])

    def _by_masks(self, args: Any) -> Any:
        """Select by index what a mask of unknown values selects: all elements."""
        if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            return NotImplemented
        with self:
            return aten.index.Tensor(args[0], list(_as_indices(args[1])))

    def _all_finite(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Find no infinity in gradients, whose values are unknown, so that no step is skipped."""
        found = known.value_of(args[1])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if found is not None and isinstance(args[1], FakeTensor):
            known.keep(args[1], found)
        return result


_OVER = (
    "this tensor was made on a simulated card, whose simulation is over, and it has no values: make the model again "
    "outside of it, and compute on a device that is there"
)


def _placed(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of an operator that is asked for a device; there is an error if it is another card's."""
    device = kwargs["device"]
    if device.type == "cuda":  # torch's guard without devices takes card 0 for the one that is selected
        is_card(torch.device("cuda", torch.cuda.current_device() or device.index or 0))
    if func is _COPIES and device.type == "meta":  # a skeleton of a model: its bytes are in neither place
        return {**kwargs, "device": _HOST}
    return kwargs


def _are_apart(args: Any, kwargs: Any) -> bool:
    """Return whether some of several tensors are on the card, and some in host memory; numbers go with others."""
    return len({tensor.device.type for tensor in tensors_of((args, kwargs)) if tensor.dim()}) > 1


def _forget(args: Any, kwargs: Any) -> None:
    """Forget what is taken for true of tensors that an operator may have written: its first argument, or ``out``."""
    for tensor in tensors_of((args[:1], kwargs.get("out"))):
        for each in (tensor, tensor._base):
            if each is not None:
                placeholders.forget(each)
                bounds.forget(each)
                forget_ones(each)


def _as_indices(indices: Any) -> Iterator[Any]:
    for index in indices:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            yield from aten.nonzero.default(index).unbind(1)
        else:
            yield index


def _indices(x: Tensor, count: int, *more: int) -> Tensor:
    return x.new_empty((count, *more), dtype=torch.int64)


def _unique(x: Tensor, _: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    inverse = _indices(x, *x.shape) if return_inverse or return_counts else _indices(x, 0)
    below = bounds.below(x)
    most = x.numel() if below is None else min(x.numel(), below)
    counts = _indices(x, most if return_counts else 0)
    if return_counts and most:
        masks.keep_counts(counts, x.numel(), most)
    return x.new_empty(most), inverse, counts


def _unique_rows(x: Tensor, dim: int, _: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    count = x.shape[dim]
    return x.new_empty(x.shape), _indices(x, count if inverse else 0), _indices(x, count if counts else 0)


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return a count of each integer that there can be; if the largest is unknown, of as many as are asked for."""
    length = max(bounds.below(x) or 0, minlength)
    if not length:
        raise UntraceableError(_NO_BOUND.format("aten::bincount"))
    if weights is not None:
        return weights.new_empty(length)
    counts = _indices(x, length)
    masks.keep_counts(counts, x.numel(), bounds.below(x) or length)
    return counts


def _is_shared(operator: str, x: Tensor, *more: Any) -> bool:
    """Return whether an operator chooses an equal share, or counts those of all numbers that there are."""
    if operator == "aten::bincount":
        choices, asked = bounds.choices(x), more[1] if len(more) > 1 else 0
        return choices is not None and choices <= asked
    found = ones(more[0] if operator == "aten::masked_select" else x)
    return found is not None and found.is_share


def _true(mask: Tensor) -> int:
    """Return how many elements of a mask are taken to be true."""
    found = ones(mask)
    return mask.numel() if found is None else found.number


def _selected(x: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    return x.new_empty(_true(mask) * (shape.numel() // max(mask.numel(), 1)))


_LARGEST: dict[str, Callable[..., Any]] = {
    "aten::nonzero": lambda x: _indices(x, _true(x), x.dim()),
    "aten::masked_select": _selected,
    "aten::_unique2": _unique,
    "aten::bincount": _counts,
    "aten::unique_dim": _unique_rows,
    "aten::unique_consecutive": lambda x, inverse=False, counts=False, dim=None: _unique(x, True, inverse, counts),
    "torchvision::nms": lambda boxes, scores, threshold: _indices(boxes, boxes.shape[0]),
}
"""Operators whose results have a largest shape, by name."""

_CHOOSES = ("aten::nonzero", "aten::masked_select", "torchvision::nms")
"""Those that choose some of the elements, an unknown number."""


def values(tensor: Tensor) -> Tensor:
    """Return a real tensor of the known or plausible values of a tensor."""
    value = known.value_of(tensor)
    if value is not None:
        return value
    with _disabled():
        return torch.full(tensor.shape, placeholders.one(tensor), dtype=tensor.dtype)


def real_if_known(tensor: Tensor) -> Tensor:
    """Return a small tensor in host memory, whose values are known, as a real one; another as it is."""
    value = known.value_of(tensor)
    most_bytes = LARGEST_REAL_BYTES if tensor.is_floating_point() else known.MOST_BYTES
    if value is None or tensor.requires_grad or tensor.nbytes > most_bytes:
        return tensor
    with _disabled():
        return value.clone()


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
