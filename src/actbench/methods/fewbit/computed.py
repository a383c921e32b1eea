"""Finds the function of a layer by running its code on numbers; class names are not trusted.

The layer itself does not run, but an object of its class with its attributes and nothing else: no hooks, no tensors. So
nothing that the code assigns stays. The function stays unknown if the code looks at values, draws random numbers,
assigns attributes, or calls operators other than torch's own (docs/decisions/0030-what-a-layer-computes.md).
"""

from __future__ import annotations

import functools
import inspect
import random
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from actbench.methods.fewbit.called.functions import FUNCTIONS, Settings

_PLAIN = bool, int, float, str, type(None), torch.dtype, type, types.FunctionType, types.BuiltinFunctionType
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_TORCHS_OWN = ("aten", "prim", "prims")
_UNKNOWABLE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


Array = NDArray[np.float64]


@functools.cache
def points() -> Array:
    """Return numbers of both signs, closer near 0, not the same on both sides, and where derivatives jump."""
    right, left = (np.sinh(np.linspace(0, np.arcsinh(7e4), count)[1:]) for count in (900, 796))
    jumps = [0.0, -6.0, -3.0, -1.0, -0.5, 0.5, 1.0, 3.0, 6.0]
    far = [1e6, 1e9, 1e12, -1e6, -1e9, -1e12, np.nan, np.inf, -np.inf]
    return np.concatenate([right, -left, jumps, far])


class Numbers(NamedTuple):
    """What a function of each element gives.

    Attributes:
        values: The function at :func:`points`.
        slopes: Its derivative there, as autograd computes it.
        calls: The functions of :data:`~actbench.methods.fewbit.called.functions.FUNCTIONS` that the code called, each
            with the arguments of its layer; None for arguments that no layer has.
        inplace: Whether the result is written over the input.
    """

    values: Array
    slopes: Array
    calls: tuple[tuple[Any, Settings | None], ...]
    inplace: bool

    def equals(self, other: Numbers, at: Any = ...) -> bool:
        """Return whether values and slopes are equal to the rounding of float32, at all points or at a part of them."""
        return all(
            np.allclose(mine[at], others[at], rtol=1e-5, atol=1e-6, equal_nan=True)
            for mine, others in ((self.values, other.values), (self.slopes, other.slopes))
        )


def numbers_of(layer: nn.Module, kind: type[nn.Module] | None = None) -> Numbers | None:
    """Return what a layer computes if it is a function of each element; None if it is not, or cannot be known to be.

    Nobody can know it of a layer that holds tensors, other layers or objects that may change, or whose forward or call
    is rebound.

    Args:
        layer: The layer; it is not run.
        kind: The class whose forward is run, by default the layer's.
    """
    kind = type(layer) if kind is None else kind
    attributes = {name: value for name, value in vars(layer).items() if name not in _OF_EVERY_MODULE}
    holds = any(True for held in (layer.children(), layer.parameters(), layer.buffers()) for _ in held)
    rebound = "forward" in attributes or type(layer).__call__ is not nn.Module.__call__
    if holds or rebound or not all(map(_is_plain, attributes.values())):
        return None
    return _of_class(kind, kind.forward, tuple(attributes.items()))  # type: ignore[arg-type]  # mypy: not Hashable


@functools.lru_cache(maxsize=1024)  # a model has many equal activations, and each is asked about several times
def _of_class(kind: type[Any], forward: Callable[..., Any], attributes: tuple[tuple[str, Any], ...]) -> Numbers | None:
    if not _takes_one(forward):
        return None
    # RReLU and dropout are other functions in training
    in_training, in_evaluation = (_of_shell(kind, forward, dict(attributes, training=flag)) for flag in (True, False))
    if in_training is None or in_evaluation is None:
        return None
    equal = in_training.inplace is in_evaluation.inplace and in_training.equals(in_evaluation)
    return in_training if equal else None


forget = _of_class.cache_clear
"""Forget what was told: attributes of classes, and functions that code calls, may be others by the next conversion."""


def _takes_one(forward: Callable[..., Any]) -> bool:
    """Return whether a method can be called with one argument, by its place."""
    try:
        inspect.signature(forward).bind(None, None)
    except (TypeError, ValueError):  # the latter without a signature
        return False
    return True


def _of_shell(kind: type[Any], forward: Callable[..., Any], attributes: dict[str, Any]) -> Numbers | None:
    try:
        # without the constructor of its class, whose arguments are unknown
        shell = nn.Module.__new__(kind)
        nn.Module.__init__(shell)
    except Exception:  # the class is not ours
        return None
    vars(shell).update(attributes)
    before = dict(vars(shell))
    found = numbers(functools.partial(forward, shell))
    after = vars(shell)
    kept = after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    return found if kept else None


def numbers(function: Callable[[Tensor], Any]) -> Numbers | None:
    """Return what a function of a tensor gives on the CPU; None if it is not elementwise, or cannot be known to be.

    The states of Python's and NumPy's random numbers stay as they are; torch's are not touched.
    """
    known = random.getstate(), np.random.get_state(legacy=False)
    try:
        with alone():
            x = torch.from_numpy(points())
            found = _run(function, x)
            # in another order and in four dimensions: what is elementwise gives the same numbers
            other = _run(function, x.flip(0).reshape(2, -1, 2, 2).transpose(1, 3))
        drew = random.getstate() != known[0] or str(np.random.get_state(legacy=False)) != str(known[1])
    except Exception:  # the code is not ours: whatever fails on numbers is not a function of each element
        return None
    finally:
        random.setstate(known[0])
        np.random.set_state(known[1])
    values, slopes = (each.transpose(0, 3, 2, 1).reshape(-1)[::-1] for each in other[:2])
    return found if found.equals(other._replace(values=values, slopes=slopes)) and not drew else None


def _run(function: Callable[[Tensor], Any], numbers: Tensor) -> Numbers:
    """Run a function on numbers.

    Raises:
        Exception: It fails, or it returns something else than a tensor with a value for each number.
    """
    x = numbers.clone().requires_grad_()
    given = x.clone()  # no leaf, so that it may be overwritten
    with _OnlyTorch(), _Calls() as calls:  # type: ignore[no-untyped-call]
        y = function(given)
        (slopes,) = torch.autograd.grad(y, x, torch.ones_like(y))
    # NaN is not equal to itself
    inplace = not torch.equal(given.nan_to_num(7.0), numbers.nan_to_num(7.0))
    shared = y.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    if y.shape != x.shape or y.dtype != x.dtype or inplace is not (y is given) or shared is not inplace:
        raise ValueError("no function of each element")
    return Numbers(y.detach().numpy(), slopes.numpy(), tuple(calls.found), inplace)


def _is_plain(value: Any) -> bool:
    """Return whether a value cannot change, nor hold one that can."""
    if isinstance(value, functools.partial):
        return all(map(_is_plain, (value.func, *value.args, *value.keywords.values())))
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN)


@contextmanager
def alone() -> Iterator[None]:
    """Keep what the caller has switched on away from a run: modes, default devices, types and warnings."""
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


class _OnlyTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where code draws random numbers, asks for values, or calls operators that are not torch's own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator."""
        if func.namespace not in _TORCHS_OWN or any(tag in func.tags for tag in _UNKNOWABLE):
            raise ValueError(f"{func} is called")
        return func(*args, **kwargs or {})


class _Calls(TorchFunctionMode):
    """Notes which functions of a layer are called, as they would be intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Any, Any], None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function."""
        called = FUNCTIONS.get(func)
        if called is not None:
            call = called.call(args, kwargs or {})
            self.found[func, None if call is None else call.settings] = None
        return func(*args, **kwargs or {})
