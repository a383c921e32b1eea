from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from actbench.errors import NothingToConvertError
from actbench.methods.actnn.bitallocation import BitAllocation
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed, fan_in, parametrized_layers, small_codes
from actbench.methods.actnn.layers.modelforward import ALLOCATED, SWAPPED, CompressedForward
from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.methods.actnn.variance import rounding_variance
from actbench.model.gradient import Gradient
from actbench.model.records import Site
from actbench.packing import HostOffload, Identity, SavedTensors, SiteState
from actbench.packing.hooked import HookedForward, Hooks
from actbench.packing.replacement import attention_modules, census, reasons, swap
from actbench.packing.samplegradients import SampleGradients
from actbench.packing.wrapped import bind_entries
from actbench.scheme.base import LINEAR_LAYERS, NOTHING_PACKED, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Adaptive, Diagnosed, Facet
from actbench.scheme.setup import Part, TrainingSetup
from actbench.units import GIB

Level = Literal["L0", "L1", "L2", "L3", "L3.1", "L4", "L5", "swap"]

_FIXED = {"bits": 4.0, "per_layer": False, "per_sample": False}
LEVELS: dict[Level, dict[str, Any]] = {
    "L0": {"compress": False, "per_layer": False, "per_sample": False},
    "L1": {**_FIXED, "quantized_bn": False},
    "L2": _FIXED,
    "L3": {},
    "L3.1": {"empty_cache_threshold": 0.2, "pipeline_threshold": 3 * GIB},
    "L4": {"swap": True},
    "L5": {"swap": True, "expandable_segments": True},
    "swap": {"compress": False, "swap": True},
}
"""The keys that each level sets; :data:`DEFAULTS` has the others."""

DEFAULTS: dict[str, Any] = {
    "compress": True,
    "bits": 2.0,
    "per_layer": True,
    "per_sample": True,
    "quantized_bn": True,
    "swap": False,
    "empty_cache_threshold": None,
    "pipeline_threshold": None,
    "expandable_segments": False,
}


class ActNN(Scheme):
    """Layers save their inputs in groups of few bits; bits are allocated by what each input adds to the variance.

    Paper: Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training",
    arXiv 2104.14129.
    Kept for backward: the inputs of convolutions, linear layers and norms as codes of a few bits, with an offset and a
    maximum for each group, 32 bits together; for ReLU and dropout 1 bit an element; for max pooling the place of the
    maximum in its window; for attention what it saves, packed by hooks. An input that several layers read is packed
    once. The forward pass is exact. Gradients of weights and biases are unbiased if the gradient of the layer's output
    is. The gradient of a norm's input is too small by the share v / M: M elements are normalised together, and v is the
    variance of a decoded one, about ``range**2 / (6 * (2**bits - 1)**2)``; this is 1 % for a layer norm of width 32 at
    2 bits. Attention has a small bias too: it multiplies decoded tensors with each other.
    Bits are allocated by ``factor * range**2 * gradient**2`` over ``(2**bits - 1)**2`` (section 4 of the paper): to
    layers every ``adapt_interval`` steps (the authors' code: every step), to the samples of a batch in each forward
    pass, both without a wait for the device.
    Not reproduced: the authors' average pooling that is max pooling, new weights at conversion, waits for the device.

    Attributes:
        level: Sets the keys below that are not given; see the table.
        bits: Bits per element, 1 to 8: an average where bits are allocated, else a whole number.
        group_size: Elements that share an offset and a maximum, a multiple of 32 from 32 to 1024.
        per_group: False for one offset and maximum for each tensor.
        per_layer: Whether bits are allocated to layers.
        per_sample: Whether bits are allocated to the samples of a batch.
        use_gradient: Whether the allocation to samples uses their gradients of earlier steps, by ``actbench.samples``.
        adapt_interval: Training steps from one allocation to layers to the next.
        stochastic: Whether rounding is stochastic, so that decoded values are unbiased; else to the nearest.
        quantized_bn: Whether batch norms are converted.
        swap: Whether the codes wait in host memory.
        share: Whether an input that several layers read is packed once; false packs it for each, as the authors do.
        chunk: How many pieces of the batch the backward pass of a layer is cut into.
        pipeline_threshold: Bytes of a layer's gradient and input above which its backward pass is cut further.
        empty_cache_threshold: If less than this share of the reserved memory is in use, the rest is freed; 0 to 1.
        expandable_segments: Whether torch's allocator grows its segments, so that less memory is lost between them.
    """

    name: ClassVar[str] = "actnn"
    positional: ClassVar[str | None] = "level"
    card: ClassVar[Card] = Card(
        summary="layers save inputs in groups of few bits, allocated by variance; the forward pass is exact",
        paper="Chen et al. 2021, arXiv 2104.14129",
        variants=(":L2", ":L3", ":L4"),  # 4 bits, 2, and 2 in host memory
        leading=(":L2",),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)

    level: Level = "L3"
    bits: Annotated[float, Field(ge=1, le=8)] | None = None
    group_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 256
    per_group: bool = True
    per_layer: bool | None = None
    per_sample: bool | None = None
    use_gradient: bool = False
    adapt_interval: PositiveInt = 20
    stochastic: bool = True
    quantized_bn: bool | None = None
    swap: bool | None = None
    share: bool = True
    chunk: PositiveInt = 1
    pipeline_threshold: PositiveInt | None = None
    empty_cache_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    expandable_segments: bool | None = None

    @property
    def gradient(self) -> Gradient:
        """Unbiased if rounding is stochastic, but for the small bias of norms and attention."""
        return "exact" if not self.setting("compress") else "unbiased" if self.stochastic else "approximate"

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.use_gradient and not self.setting("per_sample"):
            raise ValueError("use_gradient=true needs per_sample=true: gradients weigh the samples of a batch")
        if not self.per_group and self.setting("per_sample"):
            raise ValueError("per_group=false needs per_sample=false: with one range, all samples have the same bits")
        if self.bits is not None and not self.bits.is_integer():
            self._check_fraction(self.bits)
        return self

    def _check_fraction(self, bits: float) -> None:
        """Refuse fractional bits if all tensors have the same bits, or one range for all elements."""
        whole = f"write bits={math.floor(bits)} or bits={math.ceil(bits)}"
        if not self.per_group:
            raise ValueError(f"bits={bits:g} needs per_group=true: with one range, bits are a whole number; {whole}")
        if not (self.setting("per_layer") or self.setting("per_sample")):
            raise ValueError(
                f"bits={bits:g} is an average, and level {self.level} allocates no bits, so every tensor has the same "
                f"whole number of bits; {whole}, or allocate bits by level L3, per_layer=true or per_sample=true"
            )

    def setting(self, key: str) -> Any:
        """Return the value of a key: as given, else the level's, else the default."""
        given = getattr(self, key, None)
        return LEVELS[self.level].get(key, DEFAULTS[key]) if given is None else given

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace the layers that have a compressed form and bind hooks on attention.

        Raises:
            ConversionError: No layer has such a form, or the model is converted already or compiled.
        """
        CompressedForward.refuse(self.name, setup.module)
        codec = GroupQuantization(self.group_size, self.stochastic, self.per_group)
        placement = HostOffload() if self.setting("swap") else None
        packer = SavedTensors(codec if self.setting("compress") else Identity(), placement=placement, dedup=self.share)
        left = parametrized_layers(setup.module, self._converts)
        model, states, sites = self._swapped(setup.module, packer)
        if not sites:
            held = reasons(left) or f"it holds {census(model)}"
            raise NothingToConvertError(f"actnn: {type(model).__name__} has no layer to convert; {held}")
        hooked = self._hooked(model, packer)
        threshold = self.setting("empty_cache_threshold")
        shared_out = self.setting("compress") and self.setting("per_layer")
        allocation = BitAllocation(states, self.setting("bits"), self.adapt_interval) if shared_out else None
        uncompilable = SWAPPED if placement else ALLOCATED if allocation or self.setting("per_sample") else None
        whole = not setup.path
        CompressedForward(model, packer, allocation, threshold, bool(hooked), whole, uncompilable).bind()
        bind_entries(model)
        by = Part(self.spec, acts=packer, idle=NOTHING_PACKED)
        changed = setup.changed(model, (*sites, *hooked), left, by=by)
        return replace(changed, expandable_segments=setup.expandable_segments or self.setting("expandable_segments"))

    @property
    def facets(self) -> Iterable[Facet]:
        """Bits follow the ranges and gradients of earlier steps, if layers or samples have bits of their own."""
        by_gradients = self.setting("compress") and (self.setting("per_layer") or self.setting("per_sample"))
        adaptive = Adaptive(by_first_step=True, by_gradients=bool(by_gradients), fixed="actnn:L2")
        return adaptive, Diagnosed((rounding_variance,))

    def _swapped(self, module: nn.Module, packer: SavedTensors) -> tuple[nn.Module, list[SiteState], list[Site]]:
        states: list[SiteState] = []  # those that bits are allocated to; a norm follows the one before it
        sites: list[Site] = []
        kept = f"{self.setting('bits'):g} bits" if self.setting("compress") else "whole"
        where = " in host memory" if self.setting("swap") else ""

        def rule(layer: nn.Module, path: str) -> nn.Module | None:
            if not self._converts(type(layer)):
                return None
            state = self._state(path)
            new: Any = compressed(layer, packer, state)
            if isinstance(new, Compressed):
                _seat(state, new, states)
            if new is not None:
                becomes = f"input, {kept}{where}" if isinstance(new, Compressed) else "an exact small code"
                sites.append(Site(path=path, was=f"nn.{type(layer).__name__}", becomes=becomes))
            return new  # type: ignore[no-any-return]

        return swap(module, rule), states, sites

    def _converts(self, cls: type[Any]) -> bool:
        return bool(self.setting("quantized_bn")) or not issubclass(cls, _BatchNorm)

    def _state(self, path: str) -> SiteState:
        return SiteState(
            path,
            self.setting("bits"),
            per_sample=self.setting("per_sample"),
            sample_gradients=SampleGradients() if self.use_gradient else None,
            chunk=self.chunk,
            pipeline_threshold=self.setting("pipeline_threshold"),
        )

    def _hooked(self, model: nn.Module, packer: SavedTensors) -> list[Site]:
        """Bind hooks on the outermost modules that compute attention: their products and softmax are not layers."""
        sites = []
        for path, module in attention_modules(model):
            hooks = Hooks(packer, self.setting("bits"), small_codes(), leaves_inputs=False)
            HookedForward(module, hooks).bind()
            becomes = f"saved tensors, {self.setting('bits'):g} bits"
            sites.append(Site(path=path, was=type(module).__name__, becomes=becomes))
        return sites


def _seat(state: SiteState, layer: Compressed, states: list[SiteState]) -> None:
    """Add a state to those that bits are allocated to; the state of a norm follows the last of them."""
    inputs = fan_in(layer)
    if inputs is not None:
        state.factor = inputs / 4
        states.append(state)
    elif states:
        states[-1].followers.append(state)
