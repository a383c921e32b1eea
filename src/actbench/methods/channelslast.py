"""Channels last: convolutions and images in the memory format ``torch.channels_last``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from actbench.errors import NothingToConvertError
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.scheme.base import Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import Facet, LossyForward
from actbench.scheme.setup import TrainingSetup


class ChannelsLast(Scheme):
    """Weights of convolutions and images have their channels last in memory: ``torch.channels_last``.

    Kept for backward: the same bytes, with the channels of a pixel next to each other. The output of a convolution has
    the format of its input, so the whole network uses it. In float16 and bfloat16 tensor cores read only this format:
    in the default format cuDNN copies each tensor of a convolution to it and back. The forward pass and gradients equal
    those of the default format to rounding. The parameters stay the same objects; a checkpoint does not hold the
    format, so converted models cannot have it. It needs two-dimensional convolutions, helps with ``autocast`` or
    ``pure``, and is refused with ``fsdp``.
    """

    name: ClassVar[str] = "channels_last"
    card: ClassVar[Card] = Card(
        summary="weights and images in channels_last, in which half-precision convolutions are faster",
        rank=3,  # before other layers copy a weight
    )
    changes: ClassVar[tuple[Change, ...]] = ("memory format",)
    gradient: ClassVar[Gradient] = "exact"  # kernels of another memory format only round differently

    @property
    def facets(self) -> Iterable[Facet]:
        """Kernels round differently, and FSDP shards only the default format."""
        yield LossyForward()
        yield Limits(unsharded="channels_last: FSDP shards parameters only in the default memory format")

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Convert the weights of convolutions, in place, and make steps convert their images.

        Raises:
            NothingToConvertError: The model has no two-dimensional convolution.
        """
        layers = [part for part in setup.module.modules() if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)]
        # each once, though layers share it; with weight_norm what the weight is computed from
        found = list(dict.fromkeys(weight for layer in layers for weight in layer.parameters() if weight.dim() == 4))
        if not found:
            raise NothingToConvertError(
                f"{self.spec}: {type(setup.module).__name__} has no two-dimensional convolution; leave it out"
            )
        _convert(found)
        site = Site(path="(parameters)", was="default memory format", becomes="channels last")
        changed = setup.changed(setup.module, (site,))
        return replace(changed, precision=replace(setup.precision, memory_format=torch.channels_last))


@torch.no_grad()
def _convert(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        gradient, weight.grad = weight.grad, None
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        weight.grad = None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)
