"""Forms around other forms: the parts are those of another tensor, of which theirs is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from actbench.nn.keeping.forms import Form, Parts
from actbench.nn.keeping.transfer import Transfer


@dataclass(frozen=True)
class Around:
    """What all of them have in common; a subclass says how the tensor is restored.

    Attributes:
        inner: What the parts are parts of.
    """

    inner: Form

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.inner.dtype

    @property
    def bits(self) -> float:
        """Bits of an element of what is inside."""
        return self.inner.bits

    @property
    def divisible(self) -> bool:
        """Never: for each row all parts would be restored."""
        return False

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows of the whole tensor."""
        return self.restore(parts)[first:last]

    def seen_as(self, x: Tensor) -> Self:
        """Return the form of another view."""
        return replace(self, inner=self.inner.seen_as(x))


@dataclass(frozen=True)
class OnHost(Around):
    """Parts that wait in host memory.

    Attributes:
        device: Where they come back to.
        transfer: Who moves them.
    """

    device: torch.device
    transfer: Transfer = field(repr=False)

    def restore(self, parts: Parts) -> Tensor:
        """Bring the parts back and return the tensor."""
        return self.inner.restore(self.fetched(parts))

    def rows(self, parts: Parts, first: int, last: int) -> Tensor:
        """Return rows of what was brought back."""
        return self.inner.rows(self.fetched(parts), first, last)

    def fetched(self, parts: Parts) -> Parts:
        """Return the parts on their device."""
        return self.transfer.back(parts, self.device)


@dataclass(frozen=True)
class Repeated(Around):
    """A tensor that repeats its elements by strides of 0; the parts are those of its elements, once each.

    Attributes:
        sizes: The shape of the tensor.
    """

    sizes: torch.Size

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.sizes

    def restore(self, parts: Parts) -> Tensor:
        """Return the tensor."""
        return self.inner.restore(parts).expand(self.sizes)

    def seen_as(self, x: Tensor) -> Repeated:
        """Return the form of another view, which repeats as much."""
        return replace(self, sizes=x.shape)
