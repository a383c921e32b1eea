"""Models of fake tensors: shapes, types and bytes without values or memory.

A model that is built without its memory has large tensors that are fake, and small ones that are real: it may read
these while it is built (``torch.linspace(0, rate, depth)[i].item()``, tables of anchors). Its memory is in the large
tensors, and no number of bytes depends on their values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from actbench.device.patches import replaced
from actbench.errors import UntraceableError
from actbench.simulator import known
from actbench.simulator.cachingmode import CachingFakeMode

_HOST = torch.device("cpu")


def fake_mode() -> FakeTensorMode:
    """Return a new fake tensor mode that also accepts real tensors, and makes them fake."""
    return CachingFakeMode()


_REMEDY = "measure it with --meter cpu or --meter cuda; a program converts it without an example batch"


@contextmanager
def shapes_only(model: str = "the model", remedy: str = _REMEDY) -> Iterator[None]:
    """Turn torch's error for a model that cannot run without values into an UntraceableError.

    Raises:
        UntraceableError: ``model`` needs the values of tensors, or an operator without a fake form; ends in ``remedy``.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UntraceableError(
            f"{model} looks at the values of tensors, which fake tensors do not have "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error


def mode_of(module: nn.Module) -> FakeTensorMode | None:
    """Return the fake tensor mode of a module's parameters, or None if none of them is fake."""
    return next((p.fake_mode for p in module.parameters() if isinstance(p, FakeTensor)), None)


def to_fake(module: nn.Module, mode: FakeTensorMode, device: torch.device = _HOST) -> nn.Module:
    """Make every parameter and buffer of a module a fake tensor of ``mode`` on a device, in place; return the module.

    Shapes, strides, dtypes, ``requires_grad`` and ties are kept. A fake tensor of ``mode`` stays the same object.
    """
    _replace(module, mode, lambda tensor: device)
    return module


@contextmanager
def faked(module: nn.Module, mode: FakeTensorMode, device: torch.device = _HOST) -> Iterator[nn.Module]:
    """Make a module fake inside the block, as :func:`to_fake` does, and then restore its own tensors.

    What is on a card stays on it. They are restored after an exception too. No gradient or buffer update inside the
    block reaches them. Fake tensors that a forward pass left in other attributes of a module are removed.
    """
    tables = _tables(module)
    kept = [dict(table) for table in tables]
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        _replace(module, mode, lambda tensor: tensor.device if tensor.is_cuda else device)
        yield module
    finally:
        for table, own in zip(tables, kept, strict=True):
            table.clear()
            table.update(own)
        for found, before in attributes:
            for name in [name for name, value in found.items() if isinstance(value, FakeTensor)]:
                del found[name]
                found.update({name: before[name]} if name in before else {})


def _tables(module: nn.Module) -> list[dict[str, Any]]:
    return [table for part in module.modules() for table in (part._parameters, part._buffers)]


def _replace(module: nn.Module, mode: FakeTensorMode, place: Callable[[Tensor], torch.device]) -> None:
    """Replace parameters and buffers by fake ones, at the place of each."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}
    for table in _tables(module):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = _twin(tensor, mode, twins, place(tensor))


def _twin(
    tensor: Tensor, mode: FakeTensorMode, twins: dict[int, tuple[Tensor, Tensor]], device: torch.device
) -> Tensor:
    # a fake tensor of the meta device has no place, so it gets a twin like a real one
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device.type != "meta":
        if tensor.device != device:
            with mode:
                moved: Any = tensor.detach().to(device)
                _put(tensor, moved)
        return tensor
    if id(tensor) not in twins:
        with mode:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        # attributes that others set on a parameter, such as transformers' marks of loaded weights, go along
        for name, value in vars(tensor).items():
            vars(twin).setdefault(name, value)
        twins[id(tensor)] = (tensor, twin)  # keeps the tensor alive too: a new tensor could get the id of a dead one
    return twins[id(tensor)][1]


def _put(tensor: FakeTensor, value: FakeTensor) -> None:
    """Give a fake tensor the memory of another, where that is."""
    tensor.data = value
    # setting data does not change the attribute in Python that FakeTensor.device returns
    tensor.fake_device = value.fake_device


def asks_for_device(arguments: Iterable[Any]) -> bool:
    """Return whether an argument of an operator is a device off the CPU, with memory of its own."""
    return any(isinstance(each, torch.device) and each.type not in ("cpu", "meta") for each in arguments)


LARGEST_REAL_BYTES = 64 * 1024
"""Bytes of the largest real tensor: even a thousand of them take little memory."""

LAZY_PLACE = "_actbench_place"
"""The attribute of a parameter without a shape that has the device off the CPU that it was moved to."""

_lazily: Any = nn.parameter
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class LargeAreFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make tensors above :data:`LARGEST_REAL_BYTES`, or off the CPU, fake; enter it inside a fake tensor mode.

    Integers and truth values, which are no weights, stay real up to ``integers_bytes``.

    An operator with a fake argument runs on fake tensors. Any other operator runs on fake tensors first, to learn the
    size of its result, and then on the real ones if the result is small.

    Args:
        integers_bytes: Bytes of the largest real tensor of integers or truth values.
        draw: Told of each operator that would have drawn random numbers in host memory, its arguments and its result.
    """

    def __init__(
        self,
        integers_bytes: int = LARGEST_REAL_BYTES,
        draw: Callable[[Any, Any, Any, Tensor], object] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._integers_bytes, self._draw = integers_bytes, draw

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator the guard against compilation: nothing is compiled on fake tensors."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _holds_fake(args) or _holds_fake(kwargs.values()):
            return self._drawn(func, args, kwargs, func(*args, **kwargs))
        leaves, tree = tree_flatten((args, kwargs))
        if asks_for_device(leaves) and (mode := active_fake_mode()) is not None:
            return self._made_elsewhere(func, args, kwargs, mode)
        # real values tell a shape that depends on them; a fake form could only bound it
        if not _allocates(func, leaves) or torch.Tag.dynamic_output_shape in func.tags:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            fake_args, fake_kwargs = tree_unflatten([_shape_of(leaf) for leaf in leaves], tree)
            found = func(*fake_args, **fake_kwargs)
            results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            stays_fake = any(map(self._has_no_place, results))
        except Exception:  # the size depends on values, or the operator has no fake form; its arguments are real
            found, stays_fake = None, False
        if stays_fake:
            return self._drawn(func, args, kwargs, found)
        value = known.value_of(found) if isinstance(found, FakeTensor) else None
        if value is not None:  # computed already: an operator that draws numbers would draw others now
            return value
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _made_elsewhere(self, func: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
        """Run an operator that is asked for a device off the CPU; a small result has the values of the CPU."""
        fake_args, fake_kwargs = tree_map(lambda leaf: _moved(leaf, mode), (args, kwargs))
        found = func(*fake_args, **fake_kwargs)
        is_small = isinstance(found, FakeTensor) and found.is_floating_point() and found.nbytes <= LARGEST_REAL_BYTES
        if is_small and func._schema.name not in known.EMPTY and known.value_of(found) is None:
            # a card draws from a generator of its own, so that the CPU's has to stay as it is
            with _host_generator_kept() if _is_seeded(func) else nullcontext():
                value = known.computed(func, args, kwargs)
            if isinstance(value, Tensor):
                known.keep(found, value)
        return found

    def _drawn(self, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """Return a result after the numbers of it are drawn that have no place: known ones have been."""
        if self._draw is None or not _is_seeded(func) or not isinstance(found, FakeTensor):
            return found
        if found.device.type == "cpu" and known.value_of(found) is None:
            self._draw(func, args, kwargs, found)
        return found

    def _has_no_place(self, tensor: Tensor) -> bool:
        """Whether a tensor stays fake; on the meta device, only the empty ones that torch.load fills."""
        match tensor.device.type:
            case "cpu":
                is_float = tensor.is_floating_point() or tensor.is_complex()
                return tensor.nbytes > (LARGEST_REAL_BYTES if is_float else self._integers_bytes)
            case "meta":
                return tensor.numel() == 0
        return True


class RealDataBecomesFake(TorchFunctionMode):
    """Make a real tensor fake when a fake tensor gets it as its ``data``, for example a numpy array.

    Setting ``data`` is not an operator: torch would put real memory behind a tensor that stays fake.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # each access of Tensor.data.__set__ makes another wrapper: they are equal, not identical
        if func == _SET_DATA and isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
            args = args[0], self._mode.from_tensor(args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory(mode: FakeTensorMode) -> Iterator[None]:
    """Make large tensors fake ones of ``mode`` inside the block, and let code that builds models accept them.

    Other threads still allocate memory, so transformers is told to load in this thread.
    """
    with fakes_accepted(), mode, LargeAreFake(), RealDataBecomesFake(mode):
        yield


@contextmanager
def fakes_accepted() -> Iterator[None]:
    """Inside the block, let code that builds and loads models accept fake parameters."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.utils, "swap_tensors", _swap_fake))
        stack.enter_context(replaced(_lazily.UninitializedTensorMixin, "materialize", _materialize_fake))
        stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _leave_fake))
        # transformers.core_model_loading would start threads, in which no mode of this thread holds
        stack.enter_context(_environment("HF_DEACTIVATE_ASYNC_LOAD", "1"))
        yield


@functools.cache
def _is_seeded(func: Any) -> bool:
    return func.namespace == "aten" and torch.Tag.nondeterministic_seeded in func.tags


@contextmanager
def _host_generator_kept() -> Iterator[None]:
    """Inside the block, let what the card draws be drawn on the CPU, whose generator then has its state again."""
    # the state of a generator is a tensor, which the modes around this would make fake
    with torch._C._DisableTorchDispatch():
        before = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def _holds_fake(values: Iterable[Any]) -> bool:
    """Whether arguments of an operator, or lists among them, hold something fake; the first one ends the search."""
    return any(_holds_fake(value) if isinstance(value, list | tuple) else _is_fake(value) for value in values)


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


def _moved(value: Any, mode: FakeTensorMode) -> Any:
    """Return the fake form of a real tensor that goes elsewhere; its values go with it, if the mode keeps them."""
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def _swap_fake(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Let ``module.to`` change fake parameters, which torch refuses to swap."""

    def swapped(parameter: Tensor, applied: Tensor) -> None:
        if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor):
            _put(parameter, applied)
        else:
            swap(parameter, applied)

    return swapped


def _materialize_fake(materialize: Callable[..., None]) -> Callable[..., None]:
    """Let a lazy layer get large parameters and buffers: torch would put a fake tensor's shape into a real one."""
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def materialized(lazy: Tensor, shape: Any, device: Any = None, dtype: Any = None) -> None:
        place = device or vars(lazy).get(LAZY_PLACE) or lazy.data.device
        wanted = torch.empty(shape, device=place, dtype=dtype or lazy.data.dtype)
        if not isinstance(wanted, FakeTensor):
            materialize(lazy, shape, device, dtype)
            return
        # a FakeTensor is made of a meta tensor that is none itself
        with torch._C._DisableTorchDispatch():
            bare = torch.empty(shape, device="meta", dtype=wanted.dtype)
        made = FakeTensor(wanted.fake_mode, bare, wanted.device)  # not `wanted`: torch swaps none with a weak reference
        vars(made).update(vars(lazy), _is_param=isinstance(lazy, nn.Parameter))
        swap(lazy, made.requires_grad_(lazy.requires_grad))

    return materialized


def _leave_fake(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``trunc_normal_``, which draws until all values fit, draw once for fake tensors."""

    def filled(tensor: Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return fill(tensor, mean, std, *args, **kwargs)
        # torch's loop ends when no value is out of bounds, which is unknown of fake values
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=kwargs.get("generator"))

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
