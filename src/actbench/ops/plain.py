"""The tensors with storages that a tensor is made of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_PLAIN = (FakeTensor, Tensor, nn.Parameter)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with storages inside a tensor: the share of a DTensor, or codes and scales of a format."""
    flatten = None if type(tensor) in _PLAIN else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(part, Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(part)
