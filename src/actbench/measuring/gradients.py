"""The gradient of one step, of one rank or of all, and its distance from another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from actbench.measuring.ranks import are_real
from actbench.nn.parallel.mesh import DATA
from actbench.setup import Batch, TrainingSetup, TrainStep

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


def mean(gradients: Gradients | None, module: nn.Module, mesh: DeviceMesh | None) -> Gradients | None:
    """Return the mean of gradients over the ranks with batches of their own, by name, in host memory.

    That is the gradient of their batches together. Without other ranks the gradients are returned as they are. None is
    what a rank has whose memory was not enough: then all return None.
    """
    if mesh is None or not are_real(mesh):
        return gradients
    if not _have_all(gradients is not None) or gradients is None:
        return None
    found: dict[str, Tensor] = {}
    for name, gradient in _named(gradients, module):
        total = gradient.detach().cpu().clone()
        if DATA in (mesh.mesh_dim_names or ()):
            group = mesh.get_group(DATA)
            distributed.all_reduce(total, group=group)
            total /= group.size()
        found[name] = total
    return found


def whole(gradients: Gradients | None, module: nn.Module, mesh: DeviceMesh | None) -> Gradients | None:
    """Return gradients of which each rank may hold a part as whole ones, by name, in host memory.

    Without other ranks they are returned as they are.
    """
    if gradients is None or not are_real(mesh):
        return gradients
    return {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
        for name, gradient in _named(gradients, module)
    }


def _have_all(here: bool) -> bool:
    missing = torch.tensor(0 if here else 1)
    distributed.all_reduce(missing)
    return not missing.item()


def _named(gradients: Gradients, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by the names of their parameters, in an order that all ranks share."""
    for name, parameter in module.named_parameters():
        if parameter in gradients:
            yield name, gradients[parameter]
