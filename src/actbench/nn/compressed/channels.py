"""The gradient of batch norm in closed form, a piece of the batch at a time.

With xhat = (x - mean) * invstd over M values of a channel, and y = weight * xhat + bias, in training

    dx = weight * invstd * (dy - sum(dy) / M - xhat * sum(dy * xhat) / M)

(Ioffe and Szegedy 2015, arXiv 1502.03167, section 3). The two sums run over the whole batch, so each piece is decoded
twice: once for them, once for dx. With the statistics of a whole training set, in evaluation, their terms fall away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actbench.nn.compressed.savedinput import RowByRow, SavedInput, summed, wide


@dataclass(frozen=True)
class Statistics:
    """What a batch was normalised with; a number for each channel.

    Attributes:
        mean: Subtracted.
        invstd: Multiplied with.
        weight: Multiplied with afterwards; None for ones.
    """

    mean: Tensor
    invstd: Tensor
    weight: Tensor | None

    def deviation(self, x: Tensor) -> Tensor:
        """Return ``x - mean``, in float32 for halves."""
        return x.to(wide(x.dtype)) - _over_channels(self.mean, x)

    def slope(self, x: Tensor) -> Tensor:
        """Return ``weight * invstd``, to be multiplied with x."""
        return _over_channels(
            self.invstd if self.weight is None else self.invstd * self.weight.to(self.invstd.dtype), x
        )


def sums(saved: SavedInput, grad: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return the sums over each channel of dy and of dy (x - mean), in float32 for halves."""

    def of(piece: slice) -> tuple[Tensor, Tensor]:
        part = grad[piece].to(wide(grad.dtype))
        return _per_channel(part), _per_channel(statistics.deviation(saved.rows(piece)).mul_(part))

    gathered = summed(saved.pieces(), of)
    assert gathered[0] is not None
    assert gathered[1] is not None
    return gathered[0], gathered[1]


def sum_of(grad: Tensor) -> Tensor:
    """Return the sum over each channel of dy, in float32 for halves."""
    return grad.sum(_others(grad), dtype=wide(grad.dtype))


def input_gradient(
    saved: SavedInput, grad: Tensor, statistics: Statistics, mean_dy: Tensor, mean_dy_deviation: Tensor
) -> Tensor | None:
    """Return dx in training.

    Args:
        saved: x.
        grad: dy.
        statistics: Of the batch.
        mean_dy: The first sum over M.
        mean_dy_deviation: The second sum over M, that is of dy (x - mean).
    """
    found = RowByRow(grad.shape[0])
    inclination = mean_dy_deviation * statistics.invstd.to(mean_dy.dtype).square()

    def write(piece: slice) -> None:
        x, part = saved.rows(piece), grad[piece]
        room = found.room(piece, x)
        work = room if room.dtype == wide(room.dtype) else torch.empty_like(room, dtype=wide(room.dtype))
        torch.sub(x, _over_channels(statistics.mean, x), out=work).mul_(_over_channels(inclination, x))
        torch.sub(part, work, out=work).sub_(_over_channels(mean_dy, part)).mul_(statistics.slope(part))
        room.copy_(work)

    for piece in saved.pieces():
        write(piece)
    return found.whole


def _per_channel(x: Tensor) -> Tensor:
    return x.sum(_others(x))


def _over_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return a number for each channel, to be combined with x, in float32 for halves."""
    return values.to(wide(x.dtype)).view(-1, *(1 for _ in range(x.dim() - 2)))


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
