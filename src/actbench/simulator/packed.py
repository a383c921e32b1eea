"""Packed sequences, whose operators in torch read lengths at an address that fake tensors do not have.

A packed sequence holds the first elements of all rows, then the second ones of all rows that are as long, and so on.
``batch_sizes`` are the numbers of these rows. Lengths are known if they come from the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.simulator import known

_UNKNOWN = (
    "pack_padded_sequence: the lengths are not known, since they follow from weights; give it lengths of the data, or "
    "give the layer a padded batch, which keeps as much or more"
)


def composites() -> dict[str, Callable[..., Any]]:
    """Return what replaces torch's operators of packed sequences, by their names."""
    return {"_pack_padded_sequence": _Pack.apply, "_pad_packed_sequence": _pad}


def numbers(lengths: Tensor) -> list[int]:
    """Return the values of lengths or batch sizes; an UntraceableError if they are unknown."""
    return known.integers(lengths, _UNKNOWN)


def _check(lengths: Sequence[int], steps: int) -> None:
    """Refuse lengths as torch does."""
    if min(lengths, default=0) <= 0:
        raise RuntimeError("pack_padded_sequence: the length of each row must be greater than 0")
    if list(lengths) != sorted(lengths, reverse=True):
        raise RuntimeError("pack_padded_sequence: lengths must fall, or enforce_sorted must be False")
    if lengths[0] > steps:
        raise RuntimeError(f"pack_padded_sequence: a length of {lengths[0]} is more than the {steps} steps there are")


def _runs(in_time: Tensor, batch_sizes: Sequence[int]) -> Iterator[Tensor]:
    """Return the elements of a padded batch (steps, rows, ...), for each run of steps that have equally many rows."""
    begin = 0
    for rows, run in itertools.groupby(batch_sizes):
        end = begin + len(list(run))
        yield in_time[begin:end, :rows]
        begin = end


def _fill(in_time: Tensor, data: Tensor, batch_sizes: Sequence[int]) -> None:
    """Copy the elements of a packed batch into a padded one."""
    at = 0
    for run in _runs(in_time, batch_sizes):
        elements = run.shape[0] * run.shape[1]
        run.copy_(data[at : at + elements].view(run.shape))
        at += elements


class _Pack(torch.autograd.Function):
    """Copies each run of steps, and then all of them into one tensor, as torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        of_rows = numbers(lengths)
        _check(of_rows, x.shape[int(batch_first)])
        sizes = [sum(length > step for length in of_rows) for step in range(max(of_rows))]
        in_time = x.transpose(0, 1) if batch_first else x
        data = torch.cat([run.flatten(0, 1) for run in _runs(in_time, sizes)])
        made = torch.tensor(sizes)
        ctx.shape, ctx.sizes, ctx.batch_first = in_time.shape, sizes, batch_first
        ctx.mark_non_differentiable(made)
        return data, made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        in_time = gradients[0].new_zeros(ctx.shape)
        _fill(in_time, gradients[0], ctx.sizes)
        return in_time.transpose(0, 1) if ctx.batch_first else in_time, None, None


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return rows of one length, (steps, rows, ...) or, with ``batch_first``, (rows, steps, ...), and their lengths."""
    sizes = numbers(batch_sizes)
    in_time = data.new_full((max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value)
    _fill(in_time, data, sizes)
    lengths = torch.tensor([sum(rows > row for rows in sizes) for row in range(sizes[0])])
    return in_time.transpose(0, 1) if batch_first else in_time, lengths
