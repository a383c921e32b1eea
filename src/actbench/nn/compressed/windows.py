"""The windows of a pooling, and the places in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Numbers = int | Sequence[int] | None


@dataclass(frozen=True)
class Windows:
    """Windows that slide over a plane of one to three dimensions, with a number for each of them.

    A place in a window is the number of its element in the kernel, row by row. Its offset is how far the element lies
    behind the window's start in the flattened plane; both are zero for the first. Where a window is wider than the
    plane, two places may have one offset, and either then stands for the same element.

    Attributes:
        kernel: Sizes.
        stride: From one window to the next.
        padding: On both sides.
        dilation: From one element of a window to the next.
        ceil_mode: Whether a window may begin inside of the plane and end beyond its padding.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(
        cls, dims: int, kernel_size: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers, ceil_mode: bool
    ) -> Windows:
        """Return the windows that torch's arguments describe: numbers for all dimensions, or for each."""
        kernel = numbers(kernel_size, dims)
        steps = numbers(stride, dims) or kernel
        return cls(kernel, steps, numbers(padding, dims), numbers(dilation, dims), ceil_mode)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What torch's operators take."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    @property
    def bits(self) -> int:
        """Bits that a place takes, 1 at least."""
        return max(1, (math.prod(self.kernel) - 1).bit_length())

    def fit(self, shape: Sequence[int]) -> bool:
        """Return whether places have at most 8 bits, and every window an element of the plane.

        Args:
            shape: Of the input: the plane behind one dimension or two.
        """
        dims = len(self.kernel)
        whole = all(len(of) == dims for of in (self.stride, self.padding, self.dilation))
        return (
            whole
            and len(shape) - dims in (1, 2)
            and self.bits <= 8
            and all(step <= size for step, size in zip(self.dilation, shape[-dims:], strict=True))
        )

    def reach(self, plane: Sequence[int]) -> int:
        """Return the greatest offset of a place, plus one."""
        sizes = zip(self.kernel, self.dilation, _strides(plane), strict=True)
        return 1 + sum((size - 1) * step * stride for size, step, stride in sizes)

    def offsets(self, plane: Sequence[int], device: torch.device) -> Tensor:
        """Return the offset of each place, int64 ``(places,)``."""
        places = torch.arange(math.prod(self.kernel), device=device)
        found = torch.zeros_like(places)
        for size, step, stride, below in zip(
            self.kernel, self.dilation, _strides(plane), _strides(self.kernel), strict=True
        ):
            found += (places // below % size) * (step * stride)
        return found

    def starts(self, plane: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
        """Return where each window starts in the flattened plane, int64 of shape ``counts``; in the padding below 0.

        Args:
            plane: Sizes of the plane.
            counts: How many windows there are in each dimension.
            device: Where the tensor is to be.
        """
        found = torch.zeros(*counts, dtype=torch.int64, device=device)
        for dim, (count, stride) in enumerate(zip(counts, _strides(plane), strict=True)):
            along = (torch.arange(count, device=device) * self.stride[dim] - self.padding[dim]) * stride
            found += along.view([-1 if other == dim else 1 for other in range(len(counts))])
        return found


def numbers(given: Numbers, dims: int) -> tuple[int, ...]:
    """Return one number for each dimension, as torch reads an argument; nothing for None."""
    if given is None:
        return ()
    if isinstance(given, int):
        return (given,) * dims
    return tuple(given) * dims if len(given) == 1 else tuple(given)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
