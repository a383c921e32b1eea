"""The loss of connectionist temporal classification (CTC) without values: torch's fake tensors have no form of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actbench.errors import UntraceableError
from actbench.simulator import known

aten = torch.ops.aten

LOSSES = frozenset((aten._ctc_loss.default, aten._ctc_loss.Tensor))
GRADIENTS = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)

_NONE, _MEAN = 0, 1
"""torch's numbers of two reductions."""


def by_lengths(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Run ``ctc_loss.Tensor`` by the values of its lengths, as torch does; of fake tensors it would save them instead.

    Raises:
        UntraceableError: The length of a target is not known.
    """
    of_targets = _numbers(target_lengths)
    has_values = known.value_of(input_lengths) is not None
    of_inputs = _numbers(input_lengths) if has_values else [log_probs.shape[0]] * len(of_targets)  # decide no shape
    reduced = _NONE if reduction == _MEAN else reduction
    losses: Tensor = aten.ctc_loss.IntList(log_probs, targets, of_inputs, of_targets, blank, reduced, zero_infinity)
    if reduction != _MEAN:
        return losses
    return (losses / losses.new_ones(len(losses)).clamp_min(1)).mean()  # torch itself writes lengths to an address


def lost(
    log_probs: Tensor, _: Tensor, __: Tensor | Sequence[int], lengths: Tensor | Sequence[int], *___: Any
) -> tuple[Tensor, Tensor]:
    """Return the losses of ``_ctc_loss`` and the forward variables, which the backward pass reads.

    Of log-probabilities (frames, rows, classes) these are (rows,) and (rows, frames, 2 x the longest target + 1).

    Raises:
        UntraceableError: The length of a target is not known.
    """
    frames, rows = log_probs.shape[:2]
    numbers = _numbers(lengths) if isinstance(lengths, Tensor) else lengths
    return log_probs.new_empty(rows), log_probs.new_empty(rows, frames, 2 * max(numbers, default=0) + 1)


def _numbers(lengths: Tensor) -> Sequence[int]:
    value = known.value_of(lengths)
    if value is None:
        raise UntraceableError(
            "ctc_loss: what it keeps depends on the lengths of the targets, which follow from weights; give it lengths "
            "of the data, or measure it with --meter cuda"
        )
    with torch._C._DisableTorchDispatch():
        return [int(each) for each in value]


def backward_bytes(args: Any, result: Any) -> int:
    """Return the bytes of the temporaries of ``_ctc_loss_backward``: backward variables, as many as forward ones."""
    forward: Tensor = args[6]
    return forward.numel() * forward.element_size()
