"""The variance that sketches add to a model's weight gradients: as their formula says, and as it is seen."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actbench.codecs.sketch import Sketching, batch_variance, variance
from actbench.nn.sketched import Sketched
from actbench.ops.seeds import diverge
from actbench.training import Batch, TrainingSetup


@dataclass(frozen=True)
class SketchVariance:
    """Variances of the gradient of the sketched weights, relative to its exact squared length.

    Attributes:
        predicted: The exact formula of the sketch, summed over all layers.
        observed: Mean squared distance from the exact gradient over a few sketches.
        batch: D_SGD^2, what the choice of the batch's rows adds anyway, summed over all layers.
    """

    predicted: float
    observed: float
    batch: float


def sketch_variance(setup: TrainingSetup, batch: Batch, seed: int, repeats: int = 3) -> SketchVariance | None:
    """Measure on one batch what the sketches of a model add to its weight gradients, other noise being the same.

    Runs forward and backward once without sketches, holding what the exact model would, and ``repeats`` times with
    them; gradients that the parameters had are dropped.

    Args:
        setup: With a loss and a model that :class:`~actbench.schemes.randomized.Randomized` converted.
        batch: On the model's device.
        seed: Of the dropout masks, and with the number of the repeat of the sketches.
        repeats: Over how many sketches the observed variance is a mean.

    Returns:
        The variances, or None where no sketched weight has a gradient or all gradients are zero.
    """
    layers = [module for module in setup.module.modules() if isinstance(module, Sketched)]
    weights = [layer.weight for layer in layers if layer.weight.requires_grad]
    formulas = _Formulas()
    with formulas.of_exact(layers):
        exact = _gradients(setup, batch, weights, seed, 0)
    length = sum(_square(gradient) for gradient in exact.values())
    if not length:
        return None
    observed = 0.0
    for repeat in range(repeats):
        found = _gradients(setup, batch, weights, seed, repeat)
        observed += sum(_square(found[weight] - gradient) for weight, gradient in exact.items())
    return SketchVariance(formulas.predicted / length, observed / repeats / length, formulas.batch / length)


class _Formulas:
    """Sums over sketched layers, while they run exactly, of the variances that their sketches would have."""

    def __init__(self) -> None:
        self.predicted = self.batch = 0.0

    @contextmanager
    def of_exact(self, layers: list[Sketched]) -> Iterator[None]:
        """Make layers run exactly and watch their inputs and the gradients of their outputs."""
        usual = {layer: layer.sketching for layer in layers}
        hooks = [
            layer.register_forward_hook(functools.partial(self._watch, sketching), with_kwargs=True)
            for layer, sketching in usual.items()
        ]
        try:
            for layer in layers:
                layer.sketching = Sketching(ratio=1.0)  # as many rows as the input has: nothing to sketch
            yield
        finally:
            for hook, (layer, sketching) in zip(hooks, usual.items(), strict=True):
                hook.remove()
                layer.sketching = sketching

    def _watch(self, sketching: Sketching, layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        if not output.requires_grad or not layer.weight.requires_grad:
            return
        given: Tensor = next(iter((*args, *kwargs.values())))
        x = given.detach().reshape(-1, given.shape[-1])

        def add(grad: Tensor) -> None:
            y = grad.reshape(-1, grad.shape[-1])
            self.predicted += variance(sketching.kind, x, y, sketching.size(len(x)))
            self.batch += batch_variance(x, y) if len(x) > 1 else 0.0

        output.register_hook(add)  # type: ignore[no-untyped-call]


def _gradients(
    setup: TrainingSetup, batch: Batch, weights: list[Tensor], seed: int, repeat: int
) -> dict[Tensor, Tensor]:
    """Return the gradients of the weights that get one; of one seed all repeats have the same dropout masks."""
    torch.manual_seed(seed)
    diverge(torch.default_generator, repeat)
    setup.module.zero_grad(set_to_none=True)
    setup.forward(batch).backward()  # type: ignore[no-untyped-call]
    found = {weight: weight.grad for weight in weights if weight.grad is not None}
    setup.module.zero_grad(set_to_none=True)
    return found


def _square(gradient: Tensor) -> float:
    return float(gradient.double().square().sum())
