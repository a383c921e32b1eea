"""Which tensors stay as they are, in whatever format others are packed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

from actbench.units import format_bytes


class Exclude:
    """Excludes what somebody else holds in any case, and what has no memory of its own. A copy knows no tensor.

    Args:
        smallest_bytes: Bytes below which a tensor is excluded.
        subclasses: Whether tensors of every subclass are excluded, and not only those that wrap other tensors.
    """

    def __init__(self, smallest_bytes: int = 0, *, subclasses: bool = False) -> None:
        self.smallest_bytes, self.subclasses = smallest_bytes, subclasses
        self._held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Exclude what somebody else holds (parameters, the batch): packing it would add to memory."""
        self._held.update(tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)

    def why_not(self, x: Tensor) -> str | None:
        """Return why a tensor is excluded, or None."""
        if x.layout != torch.strided:
            return f"layout {x.layout}"
        if self._is_subclass(x):
            return f"a {type(x).__name__}"
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):  # of another part, or gathered by FSDP
            return "a parameter"
        if x.untyped_storage() in self._held:
            return "a parameter, a buffer or a part of the batch"
        return f"smaller than {format_bytes(self.smallest_bytes)}" if x.nbytes < self.smallest_bytes else None

    def _is_subclass(self, x: Tensor) -> bool:
        wraps: bool = _python_dispatch.is_traceable_wrapper_subclass(x)
        return wraps or (self.subclasses and type(x) not in (Tensor, nn.Parameter, FakeTensor))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Exclude, self.smallest_bytes, subclasses=self.subclasses), ()


@dataclass(frozen=True, eq=False)
class StaysHere:
    """A saved tensor that a hook has left where it is.

    Attributes:
        tensor: The tensor.
        version: Its version when it was saved: with hooks around it, autograd itself does not look.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> StaysHere:
        """Return a tensor as it stays.

        A node that saves its own output would hold itself for ever, so the graph is left out. A parameter is held
        itself: its ``data`` may be given other memory.
        """
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was changed in place after it was saved, as autograd says without hooks.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Give parameters and buffers; a replica of ``nn.DataParallel`` names its parameters in a place of their own."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from vars(part).get("_former_parameters", {}).values()
