"""The variance that sketches and rounding add to a model's gradients; for sketches also by formula."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actbench.codecs.sketch import Sketching, batch_variance, variance
from actbench.microbatches import cut, rows_of
from actbench.nn.compressed.linear import Sketched
from actbench.nn.compressed.savedinput import Compressed
from actbench.nn.forwardwrapper import ReboundForward
from actbench.nn.hooked import HookedForward
from actbench.nn.saved import Identity, SavedTensors
from actbench.ops.noise import diverge
from actbench.results.measured import Diagnostic
from actbench.setup import Batch, TrainingSetup


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
            _of_batch(self.batch),
        )


def sketch_variance(setup: TrainingSetup, batch: Batch, seed: int, repeats: int = 3) -> SketchVariance | None:
    """Measure on one batch the variance that sketches add to the weight gradients, with all other noise the same.

    It runs forward and backward once without sketches, with the memory of the exact model, and ``repeats`` times with
    them; earlier gradients of the parameters are dropped.

    Args:
        setup: With a loss and a model that :class:`~actbench.schemes.randomized.Randomized` converted.
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
        exact = _gradients(setup, batch, weights, seed, 0)
    length = sum(_square(gradient) for gradient in exact.values())
    if not length:
        return None
    observed = _observed(setup, batch, exact, seed, repeats)
    return SketchVariance(formulas.predicted / length, observed / length, formulas.batch / length)


@dataclass(frozen=True)
class RoundingVariance:
    """Variances of the gradient of all parameters, relative to its exact squared length.

    Attributes:
        observed: Mean squared distance from the exact gradient over a few draws of the rounding noise.
        batch: The variance from the choice of the batch's rows, from the gradients of a few parts of the batch, for a
            loss that is a mean over rows; None if the batch cannot be cut into parts.
    """

    observed: float
    batch: float | None

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Return the known variances as diagnostics of a record."""
        rounding = Diagnostic(name="quantization_variance_observed", title="Variance, rounding", value=self.observed)
        return (rounding,) if self.batch is None else (rounding, _of_batch(self.batch))


def _of_batch(variance: float) -> Diagnostic:
    return Diagnostic(name="sgd_variance", title="Variance, SGD", value=variance)


def rounding_variance(
    setup: TrainingSetup, batch: Batch, seed: int, repeats: int = 3, parts: int = 4
) -> RoundingVariance | None:
    """Measure on one batch the variance that rounding adds to the gradient, with all other noise the same.

    It runs forward and backward once so that the scheme adapts to the batch, once with all tensors whole on the batch
    and on each part of it, and ``repeats`` times with packed tensors; earlier gradients of the parameters are dropped.

    Args:
        setup: With a loss and a model that ActNN or GACT converted.
        batch: On the model's device.
        seed: Seed of the dropout masks and, with the number of the repeat, of the rounding.
        repeats: Number of draws over which the observed variance is averaged.
        parts: How many parts the batch is cut into.

    Returns:
        The variances, or None if all gradients are zero or nothing is packed.
    """
    packers = {packer for packer in _packers(setup.module) if not packer.codec.exact}
    weights = [parameter for parameter in setup.module.parameters() if parameter.requires_grad]
    if not packers:
        return None
    _gradients(setup, batch, weights, seed, 0)
    with _whole(packers):
        exact = _gradients(setup, batch, weights, seed, 0)
        length = sum(_square(gradient) for gradient in exact.values())
        if not length:
            return None
        of_batch = _variance_of_parts([_gradients(setup, part, weights, seed, 0) for part in _cut(setup, batch, parts)])
    observed = _observed(setup, batch, exact, seed, repeats)
    return RoundingVariance(observed / length, None if of_batch is None else of_batch / length)


def _observed(setup: TrainingSetup, batch: Batch, exact: dict[Tensor, Tensor], seed: int, repeats: int) -> float:
    """Return the mean squared distance from the exact gradients over some repeats."""
    observed = 0.0
    for repeat in range(repeats):
        found = _gradients(setup, batch, exact, seed, repeat)
        observed += sum(_square(found[weight] - gradient) for weight, gradient in exact.items())
    return observed / repeats


def _packers(module: nn.Module) -> Iterator[SavedTensors]:
    for child in module.modules():
        if isinstance(child, Compressed):
            yield child.packer
        for forward in ReboundForward.all_of(child):
            if isinstance(forward, HookedForward):
                yield forward.hooks.packer


@contextmanager
def _whole(packers: Iterable[SavedTensors]) -> Iterator[None]:
    """Make packers leave tensors whole."""
    codecs = {packer: packer.codec for packer in packers}
    for packer in codecs:
        packer.codec = Identity()
    try:
        yield
    finally:
        for packer, codec in codecs.items():
            packer.codec = codec


def _cut(setup: TrainingSetup, batch: Batch, parts: int) -> list[Batch]:
    """Return parts of the rows of a batch; none if its values have different rows, or too few, or rows no samples."""
    rows = 0 if setup.micro_batching.uncut() else rows_of(batch) or 0
    return [part.batch for part in cut(batch, parts)] if rows >= 2 * parts else []


def _variance_of_parts(found: list[dict[Tensor, Tensor]]) -> float | None:
    """Return the variance of the mean of some gradients, from how they differ."""
    count = len(found)
    if count < 2:
        return None
    squares = 0.0
    for weight in found[0]:
        each = torch.stack([gradients[weight] for gradients in found])
        squares += _square(each - each.mean(0))
    return squares / (count * (count - 1))


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
    setup: TrainingSetup, batch: Batch, weights: Iterable[Tensor], seed: int, repeat: int
) -> dict[Tensor, Tensor]:
    """Return the gradients of the weights that get one; all repeats with one seed have the same dropout masks."""
    torch.manual_seed(seed)
    diverge(torch.default_generator, repeat)
    setup.module.zero_grad(set_to_none=True)
    setup.forward(batch).backward()  # type: ignore[no-untyped-call]
    found = {weight: weight.grad for weight in weights if weight.grad is not None}
    setup.module.zero_grad(set_to_none=True)
    return found


def _square(gradient: Tensor) -> float:
    return float(gradient.double().square().sum())
