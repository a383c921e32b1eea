"""Running statistics of norms, for passes that must not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def counting_norms(module: nn.Module) -> list[_NormBase]:
    """Return the norms inside a module that keep running statistics."""
    return [norm for norm in module.modules() if isinstance(norm, _NormBase) and norm.track_running_stats]


@contextmanager
def statistics_kept(norms: list[_NormBase]) -> Iterator[None]:
    """Keep running statistics as they are: this batch is counted by another run.

    A momentum of 0 does so without changing what the layer saves for backward, which must be the same in both runs.
    The count goes to a tensor that is thrown away, since SyncBatchNorm insists on one.
    """
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, counted in before:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None if counted is None else counted.clone()
    try:
        yield
    finally:
        for norm, momentum, counted in before:
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, counted
