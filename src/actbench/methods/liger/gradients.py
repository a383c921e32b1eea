"""Whether a backward pass may write into the gradient that it got."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from actbench.packing.refusals import first_order

_BASE_USES = 2  # of the tensor that a gradient is a view of: by the view, and by Python


def is_ours(gradient: Tensor) -> bool:
    """Return whether the backward function that got a gradient is the only one to read it.

    Called by that function itself. A gradient that another node, a hook or ``retain_grad`` also holds has more uses
    than one that torch made for this function.
    """
    uses = _uses(gradient)
    base = gradient._base
    alone = base is None or base._use_count() <= _BASE_USES
    return alone and uses == _usual()


def _uses(gradient: Any) -> tuple[int, int, int]:
    """Return the uses of a gradient by torch, of its memory by other tensors than its base, and by Python."""
    memory = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    return gradient._use_count(), memory - (gradient._base is not None), sys.getrefcount(gradient)


@functools.cache
def _usual() -> tuple[int, int, int]:
    """Return the uses of a gradient that nothing else reads."""
    found: list[tuple[int, int, int]] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @first_order
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            note(gradient)
            return (gradient * 2,)

    def note(gradient: Tensor) -> None:
        found.append(_uses(gradient))

    with unset_fake_temporarily(), torch.enable_grad():
        x = torch.ones(2, 2, requires_grad=True)
        torch.autograd.grad((Reads.apply(x) * 3).sum(), x)
    return found[0]
