"""How simulations see a loop over pieces, a step that is one kernel, and a wrapper subclass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import SPARSE, UntraceableError
from actbench.ops.library import EVERYWHERE, define

Piece = TypeVar("Piece")
Repeat = Callable[[int], AbstractContextManager[None]]
"""From a number of times to a context, inside which what is done counts as often."""

_repeat: ContextVar[Repeat] = ContextVar("_repeat", default=lambda times: nullcontext())


@contextmanager
def repeated_by(repeat: Repeat) -> Iterator[None]:
    """Inside, tell ``repeat`` how many pieces the one that runs stands for."""
    token = _repeat.set(repeat)
    try:
        yield
    finally:
        _repeat.reset(token)


def untimed() -> AbstractContextManager[None]:
    """Return a context, inside which what is done is no part of a step's time: few steps do it."""
    return _repeat.get()(0)


def one_for_all(pieces: Sequence[Piece], of: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a tensor; of a fake one only the first, which stands for all.

    All pieces but the last have one size, so the first alone sets the peak of memory. Fake operators take as long as
    small real ones, and a model of billions of numbers has tens of thousands of pieces.
    """
    if not isinstance(of, FakeTensor):
        yield from pieces
    elif pieces:
        with _repeat.get()(len(pieces)):
            yield pieces[0]


def few_for_all(pieces: Sequence[Piece], of: Tensor) -> Iterator[Piece]:
    """Yield the pieces of a tensor; of a fake one at most three: the first, one for all in the middle, and the last.

    All pieces but the last have one size, and what a piece makes may be alive until the next has made the same: from
    the second on, each begins and ends with the same bytes. So peak and blocks are those of all pieces.
    """
    if not isinstance(of, FakeTensor) or len(pieces) <= 3:
        yield from pieces
        return
    yield pieces[0]
    with _repeat.get()(len(pieces) - 2):
        yield pieces[1]
    yield pieces[-1]


def _refuse(changed: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    raise NotImplementedError(
        "one_kernel stands for a compiled kernel on fake tensors; real ones have the kernel itself"
    )


@define("one_kernel(Tensor(a!)[] changed, Tensor[] read) -> ()", {EVERYWHERE: _refuse})
def one_kernel(changed: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Read and write the tensors ``changed``, and read the tensors ``read``, all of them fake, with no temporaries.

    Raises:
        NotImplementedError: The tensors are real.
    """


def runs_triton(tensor: Tensor) -> bool:
    """Return whether kernels of Triton run on a tensor: a real one on CUDA.

    With ``TRITON_INTERPRET=1`` Triton runs them slowly on a CPU, for inspection.
    """
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return tensor.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


_PLAIN = (FakeTensor, Tensor, nn.Parameter)

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods that return the parts of a sparse tensor, by its layout."""


def plain_tensors(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with storages inside tensors: the share of a DTensor, codes and scales of a format.

    Raises:
        UntraceableError: A fake tensor is sparse: how many elements it has is not known.
    """
    for tensor in tensors:
        flatten = None if type(tensor) in _PLAIN else getattr(tensor, "__tensor_flatten__", None)
        if tensor.layout in _SPARSE:
            yield from _parts(tensor)
        elif flatten is None:
            yield tensor
        else:  # a DTensor names its mesh too
            parts = [getattr(tensor, name) for name in flatten()[0]]
            yield from plain_tensors(*(part for part in parts if isinstance(part, Tensor)))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, FakeTensor):
        raise UntraceableError(SPARSE)
    with torch._C._DisableTorchDispatch():  # a simulation around it would make the parts fake
        yield from [getattr(tensor, name)() for name in _SPARSE[tensor.layout]]
