"""Blocks whose activations are recomputed in the backward pass (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174), by torch's non-re-entrant checkpointing.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from actbench.nn.caches import copied, is_cache, is_empty
from actbench.nn.rebound import ReboundForward

TORCHVISION_BLOCKS = {
    "convnext": ("CNBlock",),
    "densenet": ("_DenseLayer",),
    "efficientnet": ("MBConv", "FusedMBConv"),
    "googlenet": ("Inception",),
    "inception": ("InceptionA", "InceptionB", "InceptionC", "InceptionD", "InceptionE"),
    "maxvit": ("MaxVitLayer",),
    "mnasnet": ("_InvertedResidual",),
    "mobilenetv2": ("InvertedResidual",),
    "mobilenetv3": ("InvertedResidual",),
    "regnet": ("ResBottleneckBlock",),
    "resnet": ("BasicBlock", "Bottleneck"),
    "shufflenetv2": ("InvertedResidual",),
    "squeezenet": ("Fire",),
    "swin_transformer": ("SwinTransformerBlock", "SwinTransformerBlockV2"),
    "vision_transformer": ("EncoderBlock",),
}
"""Classes that are one block of a model, by file of ``torchvision.models``."""

_KNOWN = {f"torchvision.models.{file}.{name}" for file, names in TORCHVISION_BLOCKS.items() for name in names}
_HUGGING_FACE_BLOCK = "GradientCheckpointingLayer"  # the class from which transformers derives every block


def is_block(module: nn.Module, names: Collection[str] = ()) -> bool:
    """Return whether a module is a block.

    Args:
        module: The module.
        names: Names of classes that count as blocks; none for the ones known of torchvision and transformers.
    """
    if names:
        return type(module).__name__ in names
    bases = type(module).__mro__
    return any(cls.__name__ == _HUGGING_FACE_BLOCK or f"{cls.__module__}.{cls.__qualname__}" in _KNOWN for cls in bases)


def blocks(model: nn.Module, names: Collection[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return path and module of each block of a model; blocks inside a block are part of it."""
    return list(_outermost(model, "", names, set()))


def _outermost(
    module: nn.Module, path: str, names: Collection[str], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    if is_block(module, names):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name, names, seen)


class RecomputedForward(ReboundForward):
    """A forward that keeps its inputs only and runs again in the backward pass; plain outside of training."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block under checkpointing."""
        module = self.module
        if not (module.training and torch.is_grad_enabled()):
            return self.inner(module, *args, **kwargs)
        args = tuple(_for_two_runs(value) for value in args)
        kwargs = {name: _for_two_runs(value) for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False

        def run(*args: Any) -> Any:
            return self.inner(module, *map(copied, args), **{name: copied(value) for name, value in kwargs.items()})

        norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and norm.track_running_stats]
        if not norms or torch.compiler.is_compiling():  # a compiled graph updates a buffer once in any case
            return checkpoint(run, *args, use_reentrant=False)
        return checkpoint(run, *args, use_reentrant=False, context_fn=functools.partial(_contexts, norms))


def _for_two_runs(value: Any) -> Any:
    """Return an argument as both runs of a block may have it.

    An empty cache of keys and values is left out, as transformers itself does, and each run is given its own copy of a
    filled one: the second would fill it again. A list is copied: the caller may append to it between the runs, as
    DenseNet does.
    """
    if is_cache(value) and is_empty(value):
        return None
    return list(value) if isinstance(value, list) else copied(value)


def _contexts(norms: list[_NormBase]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: list[_NormBase]) -> Iterator[None]:
    """Keep running statistics as they are: the first run has counted this batch already.

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
