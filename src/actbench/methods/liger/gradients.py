"""Whether a backward pass may write into the gradient that it got."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from actbench.packing.refusals import first_order

_ALONE = object()
_HELD = sys.getrefcount(_ALONE)
"""How often a frame and a call of C hold what nothing else does."""


def is_ours(gradient: Tensor) -> bool:
    """Return whether the backward function that got a gradient is the only one to read it.

    Called by that function itself. A gradient that another node, a hook or ``retain_grad`` also holds has more uses
    than one that torch made for this function. The same holds for the tensor that the gradient is a view of.
    """
    if torch.compiler.is_compiling():  # asked before anything is counted: there torch.compile breaks its graph
        return False
    held = _held(object())
    if held > _HELD and _runs_compiled():
        return False
    return _uses(gradient) == _usual(gradient._is_view(), held)


def _held(argument: object) -> int:
    """Return how often Python's frames hold an argument of a call.

    It is once more where torch.compile runs the frames, and also after it: an error under ``fullgraph`` leaves its
    evaluator of frames in place (torch 2.15).
    """
    return sys.getrefcount(argument)


def _runs_compiled() -> bool:
    """Return whether code that torch.compile made calls, whose frames hold arguments more often than ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch._dynamo.eval_frame":
        frame = frame.f_back
    return frame is not None


def _uses(gradient: Any) -> tuple[int, ...]:
    """Return the uses of a gradient by torch, of its memory by other tensors than its base, and by Python.

    Those of its base by torch and by Python follow, if it is a view.
    """
    base = gradient._base
    memory = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    own = gradient._use_count(), memory - (base is not None), sys.getrefcount(gradient)
    return own if base is None else (*own, base._use_count(), sys.getrefcount(base))


@functools.cache
def _usual(view: bool, held: int) -> tuple[int, ...]:
    """Return the uses of a gradient that nothing else reads: of a view, or of a tensor that is none.

    They are counted once for each number of times that frames hold an argument.
    """
    found: list[tuple[int, ...]] = []

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
        y = Reads.apply(x)
        torch.autograd.grad(((y.view(4) if view else y) * 3).sum(), x)
    return found[0]
