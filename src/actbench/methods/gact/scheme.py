from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import small_codes
from actbench.methods.actnn.variance import rounding_variance
from actbench.methods.gact import widths as by_type
from actbench.methods.gact.sensitivity import Probing
from actbench.model.gradient import Gradient
from actbench.packing import HostOffload, Identity, SavedTensors
from actbench.scheme.base import SAVED_RESULTS, SAVED_TENSORS, Scheme
from actbench.scheme.card import Card
from actbench.scheme.facets import Adaptive, Diagnosed, Facet
from actbench.scheme.only import parts_of
from actbench.scheme.packedsaved import with_packed_saved_tensors
from actbench.scheme.setup import TrainingSetup

Level = Literal["L0", "L1", "L1.1", "L1.2", "L2", "L2.1", "L2.2", "L3", "L4bit-swap", "swap"]

LEVELS: dict[Level, dict[str, Any]] = {
    "L0": {"compress": False},
    "L1": {"bits": 4.0, "auto_prec": False},
    "L1.1": {"bits": 8.0, "auto_prec": False},
    "L1.2": {"bits": 2.0, "auto_prec": False},
    "L2": {"bits": 4.0},
    "L2.1": {"bits": 3.0},
    "L2.2": {"bits": 2.0},
    "L3": {"bits": 4.0, "swap": True, "prefetch": True},
    "L4bit-swap": {"bits": 4.0, "auto_prec": False, "swap": True, "prefetch": True},
    "swap": {"compress": False, "swap": True},
}
"""The keys that each level of the authors' code sets; the scheme has the defaults of the others."""

IN_THE_PAPER: dict[Level, str] = {"L2": "L1", "L3": "L2"}
"""The paper's name of a level, where it has one."""


class Gact(Scheme):
    """Saved-tensor hooks pack all saved tensors in groups of few bits: any model, any layer.

    Paper: Liu et al., "GACT: Activation Compressed Training for Generic Network Architectures", arXiv 2206.11357.
    Kept for backward: each saved floating-point tensor as codes of a few bits with an offset and a maximum for each
    group, 32 bits together; booleans, dropout masks and the masks of ReLU in 1 bit; for max pooling the place of the
    maximum in its window. A tensor that several operators save is packed once; parameters and the batch stay whole.
    With ``auto_prec`` bits are allocated by sensitivity: how much the gradient changes when a group of tensors is
    disturbed. Every ``adapt_interval`` forward passes this takes one forward pass on ``samples`` rows and one backward
    pass for each of at most ``probes`` groups of tensors, in place of the authors' three passes for each tensor. A
    simulation has no values, and gives each tensor the average. In a user's own loop ``actbench.Controller`` allocates
    by the loss of that loop, and removes the hooks at the end.
    The names of the levels are those of the authors' code; its L2 is the paper's L1, and its L3 the paper's L2. The
    paper's CB1 is ``gact:L2+checkpoint``, and CB2 the same with fused attention (``--attention sdpa``).
    With ``widths`` the type of the layer that saves a tensor gives its bits, in place of sensitivity, as in AGoQ
    (arXiv 2605.00539). Of several layers that save one tensor the first gives its bits.
    Decoded tensors are unbiased, and so is a gradient that is linear in them. The gradient of a norm's input is too
    small by the share v / M: M elements are normalised together, and v is the variance of a decoded one, about
    ``range**2 / (6 * (2**bits - 1)**2)``. Attention and functions of a decoded tensor have a small bias too.
    Not reproduced: the authors' chunked attention; AGoQ's bits by pipeline stage, and its gradients in 8 bits.

    Attributes:
        level: Sets the keys below that are not given; see the table.
        bits: Bits per element, 1 to 8: an average where bits are allocated, else a whole number.
        auto_prec: Whether bits are allocated by sensitivity.
        adapt_interval: Forward passes in training from one allocation to the next.
        samples: Rows of the batch that an allocation reads.
        probes: The most groups of tensors that an allocation disturbs, but at least one of each kind.
        group_size: Elements that share an offset and a maximum, a multiple of 32 from 32 to 1024.
        stochastic: Whether rounding is stochastic, so that decoded values are unbiased; else to the nearest.
        share: Whether a tensor that several operators save is packed once; false packs it for each, as the authors do.
        small_codes: Whether masks of ReLU and places in pools are packed as small codes; false packs the output of ReLU
            and the input of a pool like any tensor, and leaves the pool's 64-bit indices, as the authors do.
        swap: Whether the codes wait in host memory.
        prefetch: Whether the next codes are fetched while the last are used.
        widths: Bits by type of layer, such as ``linear:4/norm:8/activation:2``, where no bits are allocated: linear,
            conv, norm, activation, attention. Layers of the innermost type come first; what others save has ``bits``.
        expandable_segments: Whether torch's allocator grows its segments, so that less memory is lost between them.
    """

    name: ClassVar[str] = "gact"
    positional: ClassVar[str | None] = "level"
    card: ClassVar[Card] = Card(
        summary="all saved tensors in groups of few bits, by hooks: any model",
        paper="Liu et al. 2022, arXiv 2206.11357",
        rank=20,
        variants=(":L1.1", ":L2", ":L2.2", ":L3"),  # 8 bits, 4, 2, and 4 in host memory
        leading=(":L2.2",),
    )
    claims: ClassVar[tuple[str, ...]] = (SAVED_TENSORS, SAVED_RESULTS)

    level: Level = "L2"
    bits: Annotated[float, Field(ge=1, le=8)] | None = None
    auto_prec: bool | None = None
    adapt_interval: PositiveInt = 1000
    samples: PositiveInt = 8
    probes: PositiveInt = 64
    group_size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 256
    stochastic: bool = True
    share: bool = True
    small_codes: bool = True
    swap: bool | None = None
    prefetch: bool | None = None
    widths: tuple[str, ...] = ()
    expandable_segments: bool = False

    @property
    def gradient(self) -> Gradient:
        """Unbiased if rounding is stochastic, but for the small bias of norms and attention."""
        return "exact" if not self.setting("compress") else "unbiased" if self.stochastic else "approximate"

    @field_validator("widths")
    @classmethod
    def _by_type(cls, widths: tuple[str, ...]) -> tuple[str, ...]:
        if any(each.count(":") > 1 for each in widths):
            raise ValueError(
                f"widths={'/'.join(widths)} is not a list of types of layers with their bits, such as "
                "widths=linear:4/norm:8/activation:2"
            )
        if len({by_type.read(each)[0] for each in widths}) < len(widths):
            raise ValueError(f"widths={'/'.join(widths)} names a type of layer twice")
        return widths

    @model_validator(mode="after")
    def _widths_are_not_shared_out(self) -> Self:
        if self.widths and (self.setting("auto_prec") or not self.setting("compress")):
            raise ValueError(
                f"widths= gives the bits, and level {self.level} "
                f"{'allocates them by sensitivity' if self.setting('compress') else 'packs nothing'}; "
                "take level L1, L1.1 or L1.2 with it"
            )
        return self

    @model_validator(mode="after")
    def _whole_where_nothing_is_shared_out(self) -> Self:
        if self.bits is not None and not self.bits.is_integer() and not self.setting("auto_prec"):
            near = f"bits={math.floor(self.bits)} or bits={math.ceil(self.bits)}"
            raise ValueError(
                f"bits={self.bits:g} is an average, and level {self.level} allocates no bits, so every tensor has the "
                f"same whole number of bits; write {near}, or allocate bits by level L2 or auto_prec=true"
            )
        return self

    def setting(self, key: str) -> Any:
        """Return the value of a key: as given, else the level's, else the default."""
        given = getattr(self, key, None)
        if given is not None:
            return given
        return LEVELS[self.level].get(key, {"compress": True, "auto_prec": True, "bits": 4.0}.get(key, False))

    @property
    def facets(self) -> Iterable[Facet]:
        """Tensors have bits of their own, by how much gradients change with them."""
        return Adaptive(by_gradients=self._allocates, fixed="gact:L1"), Diagnosed((rounding_variance,))

    @property
    def _allocates(self) -> bool:
        return bool(self.setting("compress") and self.setting("auto_prec"))

    def apply(self, setup: TrainingSetup) -> TrainingSetup:
        """Return the setup with the scheme applied; see :meth:`actbench.scheme.Scheme.apply`.

        Raises:
            NothingToConvertError: ``widths`` has a type that no layer is of, in the model or the parts of ``only``.
        """
        parts = [part for _, part in parts_of(setup.module, self.only)] if self.only else [setup.module]
        by_type.check(parts, map(by_type.read, self.widths))
        return super().apply(setup)

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Bind a forward with hooks on the model.

        Raises:
            ConversionError: The model has nothing to train, packs or offloads its saved tensors already, or is
                compiled.
        """
        codec = GroupQuantization(self.group_size, self.stochastic) if self.setting("compress") else Identity()
        placement = HostOffload(self.setting("prefetch")) if self.setting("swap") else None
        packer, bits = SavedTensors(codec, placement=placement, dedup=self.share), self.setting("bits")
        probing = Probing(bits, self.adapt_interval, self.samples, self.probes) if self._allocates else None
        rules = {} if codec.exact or not self.small_codes else small_codes()
        changed = with_packed_saved_tensors(
            self, setup, packer, self._becomes(), bits=bits, rules=rules, probing=probing
        )
        by_type.bind(setup.module, dict(map(by_type.read, self.widths)))
        return replace(changed, expandable_segments=setup.expandable_segments or self.expandable_segments)

    def _becomes(self) -> str:
        paper = f", the paper's {IN_THE_PAPER[self.level]}" if self.level in IN_THE_PAPER else ""
        bits = f"{self.setting('bits'):g} bits" if self.setting("compress") else "whole"
        bits += f" ({', '.join(self.widths)})" if self.widths else ""
        where = " in host memory" if self.setting("swap") else ""
        return f"saved tensors, {bits}{where} (level {self.level}{paper})"
