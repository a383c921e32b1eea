"""Half types: autocast (Micikevicius et al., arXiv 1710.03740), and whole models in a half type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from actbench.errors import ConversionError, NothingToConvertError
from actbench.model.records import HalfType, Site
from actbench.scheme.base import PRECISION, Change, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Facet, LossyForward, LowPrecision
from actbench.scheme.setup import TrainingSetup


class _Precision(Scheme):
    """A step that computes in a half type."""

    positional: ClassVar[str | None] = "dtype"
    claims: ClassVar[tuple[str, ...]] = (PRECISION,)
    changes: ClassVar[tuple[Change, ...]] = ("precision",)

    dtype: HalfType = "bfloat16"

    @property
    def _type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Autocast(_Precision):
    """Operators that torch.autocast lists compute in a half type; parameters, gradients and updates keep their type.

    Paper: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.
    Kept for backward: inputs and results of these operators in 2 bytes an element, and copies of the weights that they
    read, 2 bytes an element, until the pass ends. The scheme does the same as ``--autocast``; with both, ``actbench
    train`` scales the loss of float16.

    Attributes:
        dtype: bfloat16 (bf16) or float16 (fp16).
    """

    name: ClassVar[str] = "autocast"
    card: ClassVar[Card] = Card(
        summary="operators compute in bfloat16 or float16; parameters stay as they are (--autocast)",
        paper="Micikevicius et al. 2017, arXiv 1710.03740",
        rank=4,
        variants=(":bfloat16", ":float16"),
    )

    @property
    def facets(self) -> Iterable[Facet]:
        """Operators cast to the type; gradients of float16 vanish unless the loss is scaled."""
        return LossyForward(), LowPrecision(self.dtype, scales_loss=self.dtype == "float16")

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Run forward passes under autocast.

        Raises:
            NothingToConvertError: The model has no parameters, or computes under this autocast already.
            ConversionError: It computes under another autocast.
        """
        if not any(True for _ in setup.module.parameters()):
            raise NothingToConvertError(f"{self.spec}: {type(setup.module).__name__} has no parameters")
        autocast = setup.precision.autocast
        if autocast not in (None, self._type):
            raise ConversionError(f"{self.spec}: --autocast says {_name(autocast)}; name one type, once")
        changed = setup.changed(
            setup.module, (Site(path="(precision)", was="float32", becomes=f"{self.dtype} inside"),)
        )
        return replace(changed, precision=replace(setup.precision, autocast=self._type))


_UNDERFLOW = (
    "pure:float16: Adam's eps of 1e-8 and squares of gradients below 2e-4 are 0 in float16, so that updates can be "
    "NaN; train in pure:bfloat16, or in autocast:float16 with float32 parameters"
)


class Pure(_Precision):
    """Parameters, buffers, inputs, gradients and optimizer state have a half type: ``model.to(torch.bfloat16)``.

    Kept for backward: 2 bytes an element, like all else. The scheme does the same as ``--dtype``, but after the model
    is built, so that it also rounds tables of positions that ``--dtype`` leaves in float32. Updates below half a step
    of the type are lost; ``adam8bit,bf16_stochastic_round=true`` beside it keeps them on average, as do torchao's
    others. There are no master weights: float32 weights under ``autocast`` lose nothing.

    Attributes:
        dtype: bfloat16 (bf16) or float16 (fp16).
    """

    name: ClassVar[str] = "pure"
    card: ClassVar[Card] = Card(
        summary="parameters, inputs and optimizer state in bfloat16 or float16 (--dtype)",
        rank=2,  # before adapters and layers of other schemes see the types of parameters
        variants=(":bfloat16",),  # updates in float16 become NaN
        keeps_updates=False,  # small updates are lost in the rounding
    )

    @property
    def facets(self) -> Iterable[Facet]:
        """Everything has the type."""
        return LossyForward(), LowPrecision(self.dtype, of_weights=True)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Cast the model, in place, and make steps cast their batches.

        Raises:
            NothingToConvertError: The model has no floating-point parameters.
            ConversionError: It has another half type, or computes under autocast.
        """
        found = {parameter.dtype for parameter in setup.module.parameters() if parameter.is_floating_point()}
        if not found:
            raise NothingToConvertError(f"{self.spec}: {type(setup.module).__name__} has no floating-point parameters")
        other = next((dtype for dtype in found if dtype.itemsize == 2 and dtype != self._type), None)
        if other is not None:
            raise ConversionError(f"{self.spec}: the model is {_name(other)} (--dtype) already; name one type, once")
        autocast = setup.precision.autocast
        if autocast is not None:
            raise ConversionError(
                f"{self.spec}: --autocast says {_name(autocast)}, but all is {self.dtype} already; leave one out"
            )
        before, was = _bytes(setup.module), "+".join(sorted(map(_name, found)))
        _cast(setup.module, self._type)
        site = Site(
            path="(parameters)", was=was, becomes=self.dtype, bytes_before=before, bytes_after=_bytes(setup.module)
        )
        warnings = () if self.dtype == "bfloat16" else (_UNDERFLOW,)
        changed = setup.changed(setup.module, (site,))
        precision = replace(setup.precision, inputs=self._type)
        return replace(changed, precision=precision, warnings=setup.warnings + warnings)


@torch.no_grad()
def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers in place, as ``module.to(dtype)`` does, which fails on fake tensors."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
