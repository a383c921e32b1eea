"""The variance that sketches add to a model's gradients, measured and by formula."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actbench.methods.actnn.variance import gradients_of, observed_variance, of_batch, square
from actbench.methods.randomized.ops.sketch import Sketching, batch_variance, variance
from actbench.methods.randomized.sketched import Sketched
from actbench.model.measured import Diagnostic
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup


@dataclass(frozen=True)
class SketchVariance:
    """Variances of the gradient of the sketched weights, relative to its exact squared length.

    Attributes:
        predicted: The exact formula of the sketch, summed over all layers.
        observed: Mean squared distance from the exact gradient over a few sketches.
        batch: D_SGD^2, the variance from the choice of the batch's rows, summed over all layers.
    """

    predicted: float
    observed: float
    batch: float

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Return the variances as diagnostics of a record."""
        return (
            Diagnostic(name="sketch_variance_predicted", title="Variance, predicted", value=self.predicted),
            Diagnostic(name="sketch_variance_observed", title="Variance, observed", value=self.observed),
            of_batch(self.batch),
        )


def sketch_variance(setup: TrainingSetup, batch: Batch, seed: int, repeats: int = 3) -> SketchVariance | None:
    """Measure on one batch the variance that sketches add to the weight gradients, with all other noise the same.

    It runs forward and backward once without sketches, with the memory of the exact model, and ``repeats`` times with
    them; earlier gradients of the parameters are dropped.

    Args:
        setup: With a loss and a model that :class:`~actbench.methods.randomized.scheme.Randomized` converted.
        batch: On the model's device.
        seed: Seed of the dropout masks and, with the number of the repeat, of the sketches.
        repeats: Number of sketches over which the observed variance is averaged.

    Returns:
        The variances, or None if no sketched weight has a gradient or all gradients are zero.
    """
    layers = [module for module in setup.module.modules() if isinstance(module, Sketched)]
    weights = [layer.weight for layer in layers if layer.weight.requires_grad]
    formulas = _Formulas()
    with formulas.of_exact(layers):
        exact = gradients_of(setup, batch, weights, seed, 0)
    length = sum(square(gradient) for gradient in exact.values())
    if not length:
        return None
    observed = observed_variance(setup, batch, exact, seed, repeats)
    return SketchVariance(formulas.predicted / length, observed / length, formulas.batch / length)


class _Formulas:
    """Sums over sketched layers, while they run exactly, of the variances of their sketches by formula."""

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
                layer.sketching = Sketching(ratio=1.0)  # as many rows as the input: no sketch
            yield
        finally:
            for hook, (layer, sketching) in zip(hooks, usual.items(), strict=True):
                hook.remove()
                layer.sketching = sketching

    def _watch(self, sketching: Sketching, layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        # the first run of re-entrant checkpointing has no graph, and the second one is watched
        if not output.requires_grad or not layer.weight.requires_grad:
            return
        given: Tensor = next(iter((*args, *kwargs.values())))
        x = given.detach().reshape(-1, given.shape[-1])

        def add(grad: Tensor) -> None:
            y = grad.reshape(-1, grad.shape[-1])
            self.predicted += variance(sketching.kind, x, y, sketching.size(len(x)))
            self.batch += batch_variance(x, y) if len(x) > 1 else 0.0

        output.register_hook(add)  # type: ignore[no-untyped-call]
