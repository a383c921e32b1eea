"""Models of fake tensors: shapes, types and bytes without values or memory, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from actbench.errors import UntraceableError
from actbench.workloads.recalled import RecallingMode


def fake_mode() -> FakeTensorMode:
    """Return a new fake tensor mode that also accepts real tensors, and makes them fake.

    Tensors are fake *CPU* tensors on every machine: without a driver, fake CUDA tensors have no backward pass.
    """
    return RecallingMode()


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


def to_fake(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Make every parameter and buffer of a module a fake CPU tensor of ``mode``, in place, and return the module.

    Shapes, strides, dtypes, ``requires_grad`` and ties are kept. A fake CPU tensor of ``mode`` stays the same object.
    """
    twins: dict[int, tuple[Tensor, Tensor]] = {}
    for table in _tables(module):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = _twin(tensor, mode, twins)
    return module


@contextmanager
def faked(module: nn.Module, mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Make a module fake inside the block, as :func:`to_fake` does, and then restore its own tensors.

    They are restored after an exception too. No gradient or buffer update inside the block reaches them. Fake tensors
    that a forward pass left in other attributes of a module are removed.
    """
    tables = _tables(module)
    kept = [dict(table) for table in tables]
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    try:
        yield to_fake(module, mode)
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


def _twin(tensor: Tensor, mode: FakeTensorMode, twins: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.is_cpu:
        return tensor
    if id(tensor) not in twins:
        with mode:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            vars(twin).setdefault(name, value)
        twins[id(tensor)] = (tensor, twin)  # keeps the tensor alive too: a new tensor could get the id of a dead one
    return twins[id(tensor)][1]
