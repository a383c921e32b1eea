"""Finds by a module's operators whether it computes each position of a sequence independently.

The module runs on tensors without values, of two lengths. The check follows which tensors have a row for each position;
each operator on them must be known to leave positions apart. So the names of classes say nothing, and code that no list
foresees (a router with a capacity, a convolution over the sequence, a mean over tokens) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actbench.packing.packer import own_tensors
from actbench.packing.replacement import is_conv1d

_SIZES = (3, 7), (5, 11)
"""Rows of a batch and positions of a row, in two runs; what differs between them follows from the length."""

_PRODUCTS = frozenset(("mm", "addmm", "linear"))
_VIEWS = frozenset(("view", "_unsafe_view", "_reshape_alias"))
_NORMS = frozenset(("native_layer_norm", "_fused_rms_norm"))
_ALONG_A_DIMENSION = frozenset(
    (
        *("_softmax", "_log_softmax", "mean", "sum", "amax", "amin", "var", "linalg_vector_norm", "glu"),
        *("cat", "split", "split_with_sizes", "slice", "select", "unbind", "squeeze", "unsqueeze"),
    )
)
_OF_EACH_ELEMENT = frozenset(
    (
        *("_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "ones_like", "zeros_like"),
        *("bernoulli_", "native_dropout", "hardswish", "hardswish_", "_prelu_kernel"),
        *("_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"),  # over processes, not over positions
    )
)
"""Those that torch does not tag as pointwise."""


class _MixedError(Exception):
    """Positions are mixed, or may be; the message says by what."""


def linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers of a module, each with its adapters as one."""
    if is_conv1d(type(module)) or (hasattr(module, "in_features") and hasattr(module, "out_features")):
        yield module
        return
    for child in module.children():
        yield from linear_layers(child)


def why_not(module: nn.Module) -> str | None:
    """Return why a module of several linear layers is no MLP that may run in pieces of the sequence, or None.

    It is one if its result is as wide as its only input, and has at each position what follows from that alone.
    """
    layers = list(linear_layers(module))
    reasons = dict.fromkeys(_why_not(module, layer) for layer in layers)
    return None if None in reasons else next(iter(reasons))


def _why_not(module: nn.Module, layer: Any) -> str | None:
    """Return why a module mixes positions of an input that fits ``layer``, or None."""
    width = layer.in_features if hasattr(layer, "in_features") else layer.weight.shape[0]
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    try:
        first, second = (_operators(module, torch.empty(*sizes, width, dtype=dtype, device="meta")) for sizes in _SIZES)
    except _MixedError as mixed:
        return str(mixed)
    except Exception as error:  # of any kind: it is foreign code, which may want other arguments
        return f"it does not run on one tensor of {width} features ({type(error).__name__}: {str(error)[:80]})"
    return None if first == second else "what it computes follows from the length of the sequence"


def _operators(module: nn.Module, x: Tensor) -> list[Any]:
    """Run a module on a tensor (rows, positions, width) without values, and return what it called.

    Raises:
        _MixedError: It mixes positions, changes its input or its own tensors, or returns another shape.
    """
    twins = {tensor: _without_values(tensor) for tensor in own_tensors(module)}
    versions = [(each, each._version) for each in (x, *twins.values())]
    watch = _Watch(x)
    with torch.no_grad(), in_place_of(module, twins), _as_in_training(module):
        with watch:
            found = module.forward(x)
        if any(each._version != version for each, version in versions):
            raise _MixedError("it changes its input, a parameter or a buffer in place")
    if not isinstance(found, Tensor) or found.shape != x.shape:
        raise _MixedError("its result is not one tensor of the shape of its input")
    return watch.calls


def _without_values(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


@contextmanager
def in_place_of(module: nn.Module, twins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let a module have other parameters and buffers inside the context."""
    changed: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for part in module.modules():
            tables: tuple[dict[str, Any], ...] = part._parameters, part._buffers
            for table in tables:
                for name, value in table.items():
                    if value is not None and value in twins:
                        changed.append((table, name, value))
                        table[name] = twins[value]
        yield
    finally:
        for table, name, value in changed:
            table[name] = value


@contextmanager
def _as_in_training(module: nn.Module) -> Iterator[None]:
    """Put a module in training mode inside the context; raise a _MixedError if it assigns attributes or buffers."""
    before = [(table, dict(table)) for part in module.modules() for table in (vars(part), part._buffers)]
    for part in module.modules():
        vars(part)["training"] = True
    assigned = [(table, dict(table)) for table, _ in before]
    try:
        yield
        for table, expected in assigned:
            if table.keys() != expected.keys() or any(table[name] is not value for name, value in expected.items()):
                raise _MixedError("it assigns attributes or buffers when it runs")
    finally:
        for table, values in before:
            table.clear()
            table.update(values)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors have a row for each position of x, and raises a _MixedError where positions may meet.

    Such a tensor begins with the rows and positions of x as two dimensions, or as one.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = tuple(x.shape[:2])
        self._of_positions = {id(x): x}  # held, so that no other tensor gets the id
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in given):
            raise _MixedError("it reads a tensor with a gradient that is none of its parameters")
        name = func._schema.name.removeprefix("aten::")
        if name not in _VIEWS:
            self.calls.append((func, [leaf for leaf in leaves if not isinstance(leaf, Tensor)]))
        found = func(*args, **kwargs)
        if any(id(tensor) in self._of_positions for tensor in given):
            made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            if not all(map(self._leading, made)) or not self._is_apart(func, name, args, kwargs, given, made):
                raise _MixedError(f"it calls {func}, which may mix positions")
            self._of_positions.update((id(tensor), tensor) for tensor in made)
        return found

    def _leading(self, x: Tensor) -> int:
        """Return how many dimensions of a tensor are those of positions; 0 if it does not begin with them."""
        if x.shape[:2] == self._sizes:
            return 2
        return int(x.shape[:1] == (self._sizes[0] * self._sizes[1],))

    def _is_apart(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> bool:
        """Return whether an operator leaves positions apart."""
        rows = [tensor for tensor in given if id(tensor) in self._of_positions]
        if name in _VIEWS:
            return rows[0].numel() == made[0].numel()
        if name in _PRODUCTS:
            *added, left, right = args[:2] if name in ("mm", "linear") else args[:3]
            is_product = id(left) in self._of_positions and id(right) not in self._of_positions
            return is_product and self._fit([*added, *args[2:]] if name == "linear" else added, made[0])
        if name in _NORMS:
            return len(args[1]) <= rows[0].dim() - self._leading(rows[0]) and len(rows) == 1
        if name in _ALONG_A_DIMENSION:
            return all(self._is_along(func, args, kwargs, tensor) for tensor in rows) and len(rows) == len(given)
        return (torch.Tag.pointwise in func.tags or name in _OF_EACH_ELEMENT) and self._fit(given, made[0])

    def _fit(self, given: list[Any], made: Tensor) -> bool:
        """Return whether each tensor has the positions of the result where these stand, or is the same for all."""
        leading = self._leading(made)
        for tensor in given:
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) in self._of_positions:
                if tensor.dim() != made.dim() or self._leading(tensor) != leading:
                    return False
            elif any(size != 1 for size in tensor.shape[: max(0, tensor.dim() - made.dim() + leading)]):
                return False
        return True

    def _is_along(self, func: Any, args: Any, kwargs: Any, x: Tensor) -> bool:
        """Return whether the dimensions that an operator works along are none of positions."""
        names = [argument.name for argument in func._schema.arguments]
        if "dim" not in names:
            return False
        place = names.index("dim")
        default = func._schema.arguments[place].default_value
        dims = args[place] if place < len(args) else kwargs.get("dim", default)
        dims = [dims] if isinstance(dims, int) else dims
        ends = x.dim() + (func._schema.name == "aten::unsqueeze")
        return bool(dims) and all(dim % ends >= self._leading(x) for dim in dims)
