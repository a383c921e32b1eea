"""Flat tensors in which DistributedDataParallel averages gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Bucket:
    """Gradients that are averaged at once; stands in for ``torch.distributed.GradBucket``.

    Args:
        number: Its place in the order of averaging.
        members: The parameters, of one type.
        is_last: Whether no other comes after it.

    Attributes:
        views: The part of each parameter.
        missing: How many gradients are not there yet.
        future: The averages, once the averaging has begun.
    """

    def __init__(self, number: int, members: Sequence[nn.Parameter], *, is_last: bool) -> None:
        self._number, self._last = number, is_last
        self.members = members
        self._flat = members[0].new_empty(sum(each.numel() for each in members), requires_grad=False)
        self.views = views(self._flat, members)
        self.missing = len(members)
        self.future: Any = None

    def index(self) -> int:
        """Return its place in the order of averaging."""
        return self._number

    def is_last(self) -> bool:
        """Return whether no other comes after it."""
        return self._last

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Take another tensor in place of :meth:`buffer`."""
        self._flat = tensor

    def gradients(self) -> list[Tensor]:
        """Return the part of each parameter."""
        return self.views

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters."""
        return list(self.members)


def views(flat: Tensor, members: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the part of each parameter in a flat tensor, with its strides where it has no gaps."""
    found, offset = [], 0
    for each in members:
        found.append(flat.as_strided(each.shape, torch.empty_like(each, device="meta").stride(), offset))
        offset += each.numel()
    return found
