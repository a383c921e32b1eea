"""Building a model without its memory: its large tensors are fake, its small ones are real.

A model may read small tensors while it is built (``torch.linspace(0, rate, depth)[i].item()``, tables of anchors). Its
memory is in the large tensors, and no number of bytes depends on their values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from actbench.results.records import DTYPE, Case
from actbench.workloads.overrides import replaced


class EmptyOnMeta(TorchFunctionMode):
    """Put the results of ``torch.empty`` on the meta device, and nothing else.

    Layers make their weights by ``torch.empty`` and then initialise them, so a model built under this mode costs
    neither memory nor time. Constructors that compute with small tensors work (RegNet reads its widths from a
    ``linspace``), and computed buffers have values; under ``torch.device("meta")`` neither does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def float_type(case: Case) -> torch.dtype:
    """Return the dtype of a case, or the default."""
    dtype: torch.dtype = getattr(torch, case.dtype or DTYPE)
    return dtype


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator inside the block and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def construct(make: Callable[[], nn.Module], *, materialize: bool, seed: int) -> nn.Module:
    """Build a module, seeded, in training mode.

    Without ``materialize`` the large parameters are on the meta device, uninitialised; tied parameters stay tied.
    """
    if not materialize:
        with EmptyOnMeta():
            return make().train()
    with seeded(seed):
        return make().train()


LARGEST_REAL_BYTES = 64 * 1024
"""Bytes of the largest real tensor: even a thousand of them take little memory."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class LargeAreFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make tensors above :data:`LARGEST_REAL_BYTES`, or off the CPU, fake; enter it inside a fake tensor mode.

    An operator with a fake argument runs on fake tensors. Any other operator runs on fake tensors first, to learn the
    size of its result, and then on the real ones if the result is small.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        if any(map(_is_fake, leaves)):
            return func(*args, **kwargs)
        if not _allocates(func, leaves):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            fake_args, fake_kwargs = tree_unflatten([_shape_of(leaf) for leaf in leaves], tree)
            found = func(*fake_args, **fake_kwargs)
            stays_fake = any(_has_no_place(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        except Exception:  # the size depends on values, or the operator has no fake form; its arguments are real
            stays_fake = False
        if stays_fake:
            return found
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class RealDataBecomesFake(TorchFunctionMode):
    """Make a real tensor fake when a fake tensor gets it as its ``data``, for example a numpy array.

    Setting ``data`` is no operator: torch would put real memory behind a tensor that stays fake.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
            args = args[0], self._mode.from_tensor(args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Make large tensors fake ones of ``mode`` inside the block, and let code that builds models accept them.

    Other threads still allocate memory, so transformers is told to load in this thread.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.utils, "swap_tensors", _swap_fake))
        stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _leave_fake))
        stack.enter_context(_environment("HF_DEACTIVATE_ASYNC_LOAD", "1"))
        stack.enter_context(mode)
        stack.enter_context(LargeAreFake())  # type: ignore[no-untyped-call]
        stack.enter_context(RealDataBecomesFake(mode))
        yield


def _is_fake(value: Any) -> bool:
    """Whether a value is fake, or a storage without bytes, as torch.load makes under a fake tensor mode."""
    return isinstance(value, FakeTensor) or (isinstance(value, UntypedStorage) and value.device.type == "meta")


def _allocates(func: Any, leaves: list[Any]) -> bool:
    """Whether an operator makes a tensor with new memory: no view, and not over a storage such as a mapped file."""
    return not (func.is_view or func._schema.is_mutable or any(isinstance(leaf, UntypedStorage) for leaf in leaves))


def _shape_of(value: Any) -> Any:
    """Return the fake form of a real tensor; torch's fake tensor mode computes some operators on real tensors."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _has_no_place(tensor: Tensor) -> bool:
    """Whether a tensor stays fake; on the meta device, only the empty ones that torch.load fills."""
    match tensor.device.type:
        case "cpu":
            return tensor.numel() * tensor.element_size() > LARGEST_REAL_BYTES
        case "meta":
            return tensor.numel() == 0
    return True


def _swap_fake(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Let ``module.to`` change fake parameters, which torch refuses to swap."""

    def swapped(parameter: Tensor, applied: Tensor) -> None:
        if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor):
            parameter.data = applied
            parameter.fake_device = applied.fake_device
        else:
            swap(parameter, applied)

    return swapped


def _leave_fake(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``trunc_normal_``, which draws until all values fit, leave fake tensors alone."""

    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else fill(tensor, *args, **kwargs)

    return filled


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    own = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if own is None:
            del os.environ[name]
        else:
            os.environ[name] = own
