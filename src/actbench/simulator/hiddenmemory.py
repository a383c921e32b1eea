"""Memory changes that bypass torch's dispatcher: resized storages, what losses leave, states of the CPU's generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from actbench.device.patches import replaced

aten = torch.ops.aten

LEAVE_MORE = frozenset((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default))
"""Losses that torch computes for each element and resizes to one number; a storage does not shrink."""


_UNFOLD = frozenset((aten.im2col.default, aten.col2im.default))
"""Operators whose result begins with the size of the input, and is resized."""


def leave(func: Any, args: Any, result: Any) -> None:
    """Give a result the storage that torch leaves it.

    A loss of ``LEAVE_MORE``, if it is one number, has that of one for each element; what is unfolded or folded, that of
    the input, if it is larger; zeros of an undefined gradient have none.
    """
    if func in _UNFOLD:
        if args[0].numel() > result.numel():
            result.untyped_storage().resize_(args[0].numel() * result.element_size())
    elif func is aten._efficientzerotensor.default and isinstance(result, FakeTensor):
        result.untyped_storage().resize_(0)
    elif func in LEAVE_MORE and not result.dim():
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()  # type: ignore[no-untyped-call]
        result.untyped_storage().resize_(max(elements, 1) * result.element_size())


@contextmanager
def reported(
    resized: Callable[[torch.UntypedStorage], object], made: Callable[[list[Tensor]], object]
) -> Iterator[None]:
    """Report each storage that the block resizes, as FSDP2 does, and each state of the generator that it reads.

    Recomputed blocks and operators keep the state of the generator from the forward to the backward pass.
    """

    def telling_resize(resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            resized(storage)
            return result

        return resize_and_tell

    def telling_states(get: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def get_and_tell() -> Tensor:
            state = get()
            made([state])
            return state

        return get_and_tell

    with (
        replaced(torch.UntypedStorage, "resize_", telling_resize),
        replaced(torch, "get_rng_state", telling_states),
    ):
        yield
