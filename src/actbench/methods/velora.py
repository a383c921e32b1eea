"""VeLoRA: sub-tokens of an input as multiples of one vector (Miles et al., arXiv 2405.17991)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from actbench.errors import ConversionError
from actbench.methods.actnn.layers.layers import compressed, parametrized_layers
from actbench.methods.actnn.layers.linear import Linear
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.methods.actnn.layers.savedinput import Compressed
from actbench.model.provenance import Published
from actbench.model.records import Site
from actbench.packing import Codec, OfRows, Parts, SavedTensors, SiteState
from actbench.packing.layout import Layout
from actbench.packing.replacement import is_linear
from actbench.scheme.base import LINEAR_LAYERS, NOTHING_PACKED, Scheme
from actbench.scheme.card import Card
from actbench.scheme.setup import Part, TrainingSetup

GROUPS = 32
"""The most sub-tokens that a token is cut into if no size is given."""


@dataclass(frozen=True)
class SubTokens(OfRows):
    """One number for each sub-token: its product with a unit vector; it decodes to that multiple of the vector.

    The first tensor that a site packs sets the vector. The site keeps it, and every packed tensor has it as a part.

    Attributes:
        size: Elements of a sub-token, a divisor of the last dimension; None for :func:`usual_size`.
    """

    size: int | None

    def why_not(self, x: Tensor) -> str | None:
        """Return why the format cannot take a tensor, or None."""
        return super().why_not(x) or (
            "the size of sub-tokens does not divide its rows" if x.shape[-1] % self._size_in(x.shape[-1]) else None
        )

    def at(self, x: Tensor, site: SiteState) -> Codec:
        """Return this codec with the size for a tensor's rows."""
        return SubTokens(self._size_in(x.shape[-1]))

    def pack(self, flat: Tensor, layout: Layout, site: SiteState) -> Parts:
        """Return (elements / size,) of the tensor's type, and the site's vector, (size,) in float32."""
        assert self.size is not None
        tokens, vector = flat.view(-1, self.size), site.kept
        if isinstance(flat, FakeTensor):  # a simulation stores no vector at the site
            vector = _direction(tokens)
        elif vector is None or vector.device != flat.device:
            vector = site.kept = _direction(tokens) if vector is None else vector.to(flat.device)
        return tokens @ vector.to(flat.dtype), vector

    def unpack(self, parts: Parts, layout: Layout) -> Tensor:
        """Return the vector times each number."""
        return layout.laid_out(torch.outer(parts[0], parts[1].to(parts[0].dtype)).view(-1))

    def divisible(self, layout: Layout) -> bool:
        """Return whether dimension 0 is outermost in memory, and its entries are whole sub-tokens."""
        return layout.has_rows and layout.shape[1:].numel() % (self.size or 1) == 0

    def rows(self, parts: Parts, layout: Layout, first: int, last: int) -> Tensor:
        """Return rows, decoded from their numbers alone."""
        each = layout.shape[1:].numel() // (self.size or 1)
        return self.unpack((parts[0][first * each : last * each], parts[1]), layout.rows(first, last))

    def packed_bytes(self, layout: Layout) -> int:
        """Return the bytes of a number for each sub-token, and ``4 size`` for the vector."""
        size = self._size_in(layout.shape[-1])
        return layout.elements // size * layout.dtype.itemsize + 4 * size

    def _size_in(self, row: int) -> int:
        return self.size or usual_size(row)


def usual_size(row: int) -> int:
    """Return the least divisor of a row's elements that is at least a 32nd of them, and at least 2."""
    return next(size for size in range(max(2, -(-row // GROUPS)), max(2, row) + 1) if row % size == 0 or size >= row)


def _direction(tokens: Tensor) -> Tensor:
    """Return the mean of (n, size) sub-tokens as a float32 unit vector; with equal entries if the mean is zero."""
    mean = tokens.mean(0).float()
    unit = mean / torch.linalg.vector_norm(mean)
    return torch.where(unit.isfinite().all(), unit, len(unit) ** -0.5)


class VeLoRA(Scheme):
    """Linear layers save one number for each sub-token of their input: its length along a fixed vector.

    Paper: Miles et al., "VeLoRA: Memory Efficient Training using Rank-1 Sub-Token Projections", arXiv 2405.17991
    (NeurIPS 2024). Each row of the input is cut into sub-tokens of ``size`` elements; for each sub-token u the product
    z = u v is saved, and z v replaces u in the gradient of the weight. v is the mean of the sub-tokens of the first
    batch, scaled to length 1. It never changes, and no state_dict has it.
    Kept for backward: for each input ``elements / size`` numbers in its type, and ``4 size`` bytes for v; for ReLU,
    dropout and pools, which may save the same tensor, an exact small code. Layers that read one tensor pack it once.
    The forward pass and the gradients of inputs and biases are exact; those of weights are biased: the part of an input
    that is not along v is lost, in the same way in each step.
    The paper uses it for the value and down projections of a Llama: ``only=v_proj/down_proj``.
    Not reproduced: PEFT's rescaling of decoded values, its padding of rows that no size divides, and its new vector for
    each batch.

    Attributes:
        size: Elements of a sub-token, a divisor of each layer's input features. By default a 32nd of them (PEFT takes a
            64th), or the next larger divisor; 2 at least. Whether the paper recommends a 32nd was not checked.
    """

    name: ClassVar[str] = "velora"
    positional: ClassVar[str | None] = "size"
    card: ClassVar[Card] = Card(
        summary="linear layers save one number per sub-token of their input: its component along a vector",
        paper="Miles et al. 2024, arXiv 2405.17991",
        published=(
            Published(
                quantity="peak_saving",
                value=1 - 19.94 / 27.69,
                setting="LoRA with VeLoRA against LoRA alone, 27.69 GiB",
                source="documentation of PEFT",
            ),
        ),
    )
    claims: ClassVar[tuple[str, ...]] = (LINEAR_LAYERS,)

    size: Annotated[int, Field(ge=2)] | None = None

    def change(self, setup: TrainingSetup) -> TrainingSetup:
        """Replace linear layers by ones that save numbers, and others by ones that save an exact small code.

        Raises:
            ConversionError: The size does not divide every layer's input, no layer can be converted, or the model packs
                its saved tensors already; see :meth:`CompressedForward.bind_on`.
        """
        packer, sites = SavedTensors(SubTokens(self.size)), list[Site]()
        left = parametrized_layers(setup.module, lambda cls: issubclass(cls, Linear))

        def rule(layer: nn.Module, path: str) -> nn.Module | None:
            state = SiteState(setup.path_of(path), 0)
            new = compressed(layer, packer, state, norms=False)
            if new is None or (isinstance(new, Compressed) and not is_linear(layer)):
                return None
            becomes = "an exact small code"
            if is_linear(layer):
                size = self._size_for(layer, state.path)
                state.bits, becomes = 32 / size, f"input, 1 number for {size}"
            sites.append(Site(path=path, was=f"nn.{type(layer).__name__}", becomes=becomes))
            return new

        model = CompressedForward.bind_on(self.name, setup.module, rule, packer, left, whole_model=not setup.path)
        return setup.changed(model, tuple(sites), left, by=Part(self.spec, acts=packer, idle=NOTHING_PACKED))

    def _size_for(self, layer: Any, path: str) -> int:
        features = layer.weight.shape[1 if type(layer) is nn.Linear else 0]
        size = self.size or usual_size(features)
        if self.size is not None and features % size:
            raise ConversionError(
                f"{self.spec}: {path or 'the model'} has {features} input features, which sub-tokens of {size} do not "
                f"divide; take a divisor such as {usual_size(features)}, leave size out, or name other layers in only="
            )
        return size
