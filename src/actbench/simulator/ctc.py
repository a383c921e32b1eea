"""The loss of connectionist temporal classification (CTC) without values: torch's fake tensors have no form of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.simulator import known

aten = torch.ops.aten

LOSSES = frozenset((aten._ctc_loss.default, aten._ctc_loss.Tensor))
GRADIENTS = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)

_UNKNOWN = (
    "ctc_loss: what it keeps depends on the lengths of the targets, which follow from weights; give it lengths of the "
    "data, or measure it with --meter cuda"
)

_MEAN, _SUM = 1, 2
"""torch's numbers of two reductions."""


def composites() -> dict[str, Callable[..., Any]]:
    """Return what replaces torch's composite operators of the loss, by their names."""
    return {"ctc_loss.Tensor": _by_tensors, "ctc_loss.IntList": _by_numbers}


def _by_tensors(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *options: Any) -> Tensor:
    """Run the loss by the values of lengths, as torch does; of fake tensors it would save the lengths instead.

    Raises:
        UntraceableError: The length of a target is not known.
    """
    numbers = known.integers(lengths, _UNKNOWN)
    frames = log_probs.shape[0]  # of inputs whose lengths are unknown: these decide no shape
    are_unknown = known.value_of(inputs) is None
    of_inputs = [frames] * len(numbers) if are_unknown else known.integers(inputs, _UNKNOWN)
    return _by_numbers(log_probs, targets, of_inputs, numbers, *options)


def _by_numbers(
    log_probs: Tensor,
    targets: Tensor,
    inputs: Sequence[int],
    lengths: Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    rows = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    # LossCTC.cpp of torch widens targets to int64, whatever their type
    losses: Tensor = aten._ctc_loss.default(rows, targets.long(), inputs, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses[0]), losses)
    if reduction == _MEAN:  # torch divides by the lengths, which it writes to an address; ones have the same bytes
        return (losses / torch.ones_like(losses).clamp_min(1)).mean()
    if reduction == _SUM:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def lost(
    log_probs: Tensor, _: Tensor, __: Tensor | Sequence[int], lengths: Tensor | Sequence[int], *___: Any
) -> tuple[Tensor, Tensor]:
    """Return the losses of ``_ctc_loss`` and the forward variables, which the backward pass reads.

    Of log-probabilities (frames, rows, classes) these are (rows,) and (rows, frames, 2 x the longest target + 1).

    Raises:
        UntraceableError: The length of a target is not known.
    """
    frames, rows = log_probs.shape[:2]
    numbers = known.integers(lengths, _UNKNOWN) if isinstance(lengths, Tensor) else lengths
    # blanks stand between the labels and around them (Graves et al. 2006, section 4.1)
    return log_probs.new_empty(rows), log_probs.new_empty(rows, frames, 2 * max(numbers, default=0) + 1)


def backward_bytes(args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``_ctc_loss_backward``: backward variables, as many as forward ones."""
    forward: Tensor = args[6]
    return forward.numel() * forward.element_size()
