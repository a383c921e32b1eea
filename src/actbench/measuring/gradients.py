"""The gradient of one step, and its distance from another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

Gradients = Mapping[Any, Tensor]
"""Gradients by parameter, or by its name where ranks hold parts of it."""


def gradients_of(setup: TrainingSetup, batch: Batch, seed: int) -> Gradients:
    """Run forward and backward once, and return and remove the gradients of all parameters.

    The default generators are seeded first, so that two setups draw the same dropout masks for one batch.
    """
    torch.manual_seed(seed)
    step = TrainStep(setup, batch)
    step.hold()
    try:
        step.backward(step.forward())
        return step.gradients()
    finally:  # a step that ran out of memory leaves gradients, to which the next step would add
        step.optimizer.zero_grad(set_to_none=True)
        setup.module.zero_grad(set_to_none=True)


def relative_error_and_cosine(found: Gradients, exact: Gradients) -> tuple[float, float]:
    """Compare two gradients over all parameters as one long vector.

    Returns:
        ``|found - exact| / |exact|`` and the cosine between the two; NaN if the exact gradient is zero.
    """
    error = dot = found_square = exact_square = 0.0
    for parameter, reference in exact.items():
        mine = found.get(parameter)
        a = torch.zeros_like(reference).double() if mine is None else mine.double()
        b = reference.double()
        error += float((a - b).square().sum())
        dot += float((a * b).sum())
        found_square += float(a.square().sum())
        exact_square += float(b.square().sum())
    if exact_square == 0.0:
        return math.nan, math.nan
    norms = math.sqrt(found_square * exact_square)
    return math.sqrt(error / exact_square), dot / norms if norms else math.nan
