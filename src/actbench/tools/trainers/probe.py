"""The gradient error of a scheme on one batch of a training run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from actbench.errors import ActbenchError, MeasurementError
from actbench.measuring.gradients import Gradients, relative_error_and_cosine
from actbench.measuring.inspection.itemized import tensors_in
from actbench.ops.noise import seeds_apart
from actbench.packing.graphs import is_reentrant
from actbench.tools.convert.gradienterrors import Known, warning


class Probe:
    """Compares the gradient of one forward pass under a scheme with that of the exact model, on real tensors.

    Both run forward and backward once more with the same random numbers; no ``.grad``, buffer or random state changes.
    The exact model needs its whole memory for it. The gradient is that of the losses among the results, or else of
    their sum with random weights.

    Args:
        undone: A context in which the model is unconverted.
        scheme: The specification, for the warning.

    Attributes:
        error: Relative L2 error; None before :meth:`run`, and where there is no gradient to compare.
    """

    def __init__(self, undone: Callable[[], AbstractContextManager[None]], scheme: str) -> None:
        self._undone, self._scheme = undone, scheme
        self.error: float | None = None

    def run(self, module: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the error, and warn if it is large, or if it cannot be measured."""
        try:
            with _unchanged(module):
                found = _gradients(module, inner(module, *args, **kwargs))
            with self._undone(), _unchanged(module):
                forward: Any = module.forward
                exact = _gradients(module, forward(*args, **kwargs))
        except (ActbenchError, RuntimeError) as error:  # such as out of memory
            warnings.warn(f"the gradient could not be compared: {error}", stacklevel=2)
            return
        if not exact:
            return
        self.error, _ = relative_error_and_cosine(found, exact)
        if text := warning(self._scheme, type(module).__name__, Known(self.error, "one batch of this training")):
            warnings.warn(text, stacklevel=2)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Inside, random numbers begin at one seed; afterwards they and the buffers are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({each.device.index or 0 for each in module.parameters() if each.device.type == "cuda"})
    with torch.random.fork_rng(devices), seeds_apart():
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _gradients(module: nn.Module, output: Any) -> Gradients:
    results = [
        each for each in tensors_in(dict(output) if isinstance(output, Mapping) else output) if each.requires_grad
    ]
    losses = [each for each in results if each.dim() == 0]
    generator = torch.Generator().manual_seed(0)
    terms = losses or [
        (each.float() * torch.randn(each.shape, generator=generator).to(each.device)).sum() for each in results
    ]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not terms or not trained:
        return {}
    if is_reentrant(*terms):
        raise MeasurementError(
            "re-entrant checkpointing adds gradients to .grad and returns none; checkpoint with use_reentrant=False"
        )
    found = torch.autograd.grad(terms, trained, allow_unused=True)
    return {parameter: grad for parameter, grad in zip(trained, found, strict=True) if grad is not None}
