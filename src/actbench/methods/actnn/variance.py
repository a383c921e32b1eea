"""The variance that rounding adds to a model's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.model.measured import Diagnostic
from actbench.ops.noise import diverge
from actbench.packing import Identity, SavedTensors
from actbench.packing.forwardwrapper import ReboundForward
from actbench.packing.hooked import HookedForward
from actbench.scheme.microbatches import Batch, cut, rows_of
from actbench.scheme.setup import TrainingSetup


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
        return (rounding,) if self.batch is None else (rounding, of_batch(self.batch))


def of_batch(variance: float) -> Diagnostic:
    """Return the variance from the choice of the batch's rows as a diagnostic."""
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
    # one packer serves many layers, and is restored once
    packers = {packer for packer in _packers(setup.module) if not packer.codec.exact}
    weights = [parameter for parameter in setup.module.parameters() if parameter.requires_grad]
    if not packers:
        return None
    gradients_of(setup, batch, weights, seed, 0)
    with _whole(packers):
        exact = gradients_of(setup, batch, weights, seed, 0)
        length = sum(square(gradient) for gradient in exact.values())
        if not length:
            return None
        rows = 0 if setup.micro_batching.uncut() else rows_of(batch) or 0  # 0: they differ, or are no samples
        of_parts = [
            gradients_of(setup, each.batch, weights, seed, 0)
            for each in (cut(batch, parts) if rows >= 2 * parts else ())
        ]
        batch_variance = _variance_of_parts(of_parts)
    observed = observed_variance(setup, batch, exact, seed, repeats)
    return RoundingVariance(observed / length, None if batch_variance is None else batch_variance / length)


def observed_variance(
    setup: TrainingSetup, batch: Batch, exact: dict[Tensor, Tensor], seed: int, repeats: int
) -> float:
    """Return the mean squared distance from the exact gradients over some repeats."""
    observed = 0.0
    for repeat in range(repeats):
        found = gradients_of(setup, batch, exact, seed, repeat)
        observed += sum(square(found[weight] - gradient) for weight, gradient in exact.items())
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


def _variance_of_parts(found: list[dict[Tensor, Tensor]]) -> float | None:
    """Return the variance of the mean of some gradients, from how they differ."""
    count = len(found)
    if count < 2:
        return None
    squares = 0.0
    for weight in found[0]:
        each = torch.stack([gradients[weight] for gradients in found])
        squares += square(each - each.mean(0))
    return squares / (count * (count - 1))


def gradients_of(
    setup: TrainingSetup, batch: Batch, weights: Iterable[Tensor], seed: int, repeat: int
) -> dict[Tensor, Tensor]:
    """Return the gradients of the weights that get one; all repeats with one seed have the same dropout masks."""
    torch.manual_seed(seed)
    diverge(torch.default_generator, repeat)
    setup.module.zero_grad(set_to_none=True)
    setup.forward(batch).backward()  # type: ignore[no-untyped-call]
    found = {weight: weight.grad for weight in weights if weight.grad is not None}
    # None, not zeros: these would be written into the gradients that are returned
    setup.module.zero_grad(set_to_none=True)
    return found


def square(gradient: Tensor) -> float:
    """Return the squared length of a gradient, summed in float64."""
    return float(gradient.double().square().sum())
