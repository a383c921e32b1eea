"""Running statistics and other buffers, for passes that must not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""The buffers of norms that :func:`statistics_kept` takes care of."""

_OURS = ("torch.nn.modules.", "actbench.nn.compressed.")


def counting_norms(module: nn.Module) -> list[_NormBase]:
    """Return the norms inside a module that keep running statistics, and in training do not read them.

    Only torch's own and those that stand for them: another subclass may read them, as batch renormalisation does.
    """
    return [
        norm
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.track_running_stats and type(norm).__module__.startswith(_OURS)
    ]


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


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Let what runs inside of the block have copies of a module's buffers, which are thrown away with what it wrote.

    The buffers themselves are not touched, so that graphs of earlier passes find them unchanged. One that is made
    inside of the block stays; one that has a graph, or no memory yet, is not copied.
    """
    before = [(part, dict(part._buffers)) for part in module.modules()]
    copies: dict[Tensor, Tensor] = {}
    for part, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.requires_grad and not is_lazy(buffer):
                if buffer not in copies:
                    copies[buffer] = buffer.clone()
                part._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)
