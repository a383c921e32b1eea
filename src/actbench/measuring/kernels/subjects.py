"""The measured operators: for each a call, the bytes that it moves, and the exact operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actbench.codecs.tables import table
from actbench.nn import piecewise
from actbench.nn.activations import function_of
from actbench.nn.stepwise import StepwiseActivation
from actbench.ops import bitpack, groupquant, mask, sketch, smaq, stepwise
from actbench.ops.activate import activate, one_pass
from actbench.ops.bitpack import packed_bytes
from actbench.ops.smaq.format import SMAQ

Call = Callable[[], object]
LayerLike = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """The tensor that operators work on (shape, dtype, device), and the bits of a code."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    bits: int

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.dtype.itemsize

    def codes(self, bits: int) -> int:
        """Bytes of packed codes."""
        return packed_bytes(self.count, bits)

    def normal(self, seed: int) -> Tensor:
        """Return a standard normal tensor."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(self.rows, self.columns, dtype=self.dtype, device=self.device, generator=generator)


@dataclass(frozen=True)
class Subject:
    """An operator, ready to run, with the bytes that it moves and the exact operator that it replaces.

    ``floor_bytes`` are the bytes if each tensor were read or written once. ``compilable`` is a layer for
    ``torch.compile``, and a function that runs its forward and backward once.
    """

    call: Call
    moved_bytes: int
    floor_bytes: int
    bits: int | None = None
    exact: str | None = None
    exact_call: Call | None = None
    compilable: tuple[nn.Module, Callable[[LayerLike], Call]] | None = None


def _gelu_table(place: Place) -> tuple[Tensor, Tensor]:
    found = table(function_of(nn.GELU()), place.bits)
    return torch.tensor(found.borders, device=place.device), torch.tensor(found.levels, device=place.device)


def _encode(place: Place) -> Subject:
    x, (bounds, _) = place.normal(1), _gelu_table(place)
    least = place.bytes + place.codes(place.bits)
    return Subject(lambda: stepwise.encode(x, bounds, place.bits, False), least, least, place.bits)


def _decode(place: Place) -> Subject:
    x, grad, (bounds, levels) = place.normal(1), place.normal(2), _gelu_table(place)
    packed = stepwise.encode(x, bounds, place.bits, False)
    least = 2 * place.bytes + place.codes(place.bits)
    return Subject(lambda: stepwise.decode(packed, levels, grad, place.bits), least, least, place.bits)


def _activate(place: Place) -> Subject:
    x, (bounds, _) = place.normal(1), _gelu_table(place)
    least = 2 * place.bytes + place.codes(place.bits)
    again = 0 if _one_pass("gelu", place) else place.bytes
    return Subject(
        lambda: activate(x, "gelu", bounds, place.bits, False),
        least + again,
        least,
        place.bits,
        "gelu",
        lambda: nn.functional.gelu(x),
    )


def _one_pass(function: str, place: Place) -> bool:
    """Return whether output and codes come from one pass over the input."""
    return function == "relu" or one_pass(function, place.dtype, place.device)


def _relu(place: Place) -> Subject:
    x, least = place.normal(1), 2 * place.bytes + place.codes(1)
    return Subject(lambda: mask.relu(x), least, least, 1, "relu", lambda: torch.relu(x))


def _select(place: Place) -> Subject:
    x, grad, least = place.normal(1), place.normal(2), 2 * place.bytes + place.codes(1)
    _, bits = mask.relu(x)
    return Subject(
        lambda: mask.select(bits, grad),
        least,
        least,
        1,
        "threshold_backward",
        lambda: torch.ops.aten.threshold_backward(grad, x, 0),
    )


def _pack(place: Place) -> Subject:
    codes = torch.randint(2**place.bits, (place.count,), dtype=torch.uint8, device=place.device)
    least = place.count + place.codes(place.bits)
    return Subject(lambda: bitpack.pack_codes(codes, place.bits), least, least, place.bits)


def _unpack(place: Place) -> Subject:
    codes = torch.randint(2**place.bits, (place.count,), dtype=torch.uint8, device=place.device)
    packed = bitpack.pack_codes(codes, place.bits)
    least = place.count + place.codes(place.bits)
    return Subject(lambda: bitpack.unpack_codes(packed, place.bits, place.count), least, least, place.bits)


_GROUP_SIZE = 256


def _grouped_encode(place: Place) -> Subject:
    x, seed = place.normal(1).view(-1), torch.tensor(1)
    least = place.bytes + groupquant.packed_bytes(place.count, place.bits, _GROUP_SIZE)
    return Subject(lambda: groupquant.encode(x, place.bits, _GROUP_SIZE, seed), least, least, place.bits)


def _grouped_decode(place: Place) -> Subject:
    x, seed = place.normal(1).view(-1), torch.tensor(1)
    codes, meta = groupquant.encode(x, place.bits, _GROUP_SIZE, seed)
    least = place.bytes + groupquant.packed_bytes(place.count, place.bits, _GROUP_SIZE)
    return Subject(lambda: groupquant.decode_(x, codes, meta, place.bits, _GROUP_SIZE, 0), least, least, place.bits)


_SMAQ_BITS = 6  # of main codes; outliers, a quarter of each 256, have one more


def _smaq_encode(place: Place) -> Subject:
    x, seed = place.normal(1), torch.tensor(1)
    least = place.bytes + SMAQ.packed_bytes(place.count)
    return Subject(lambda: smaq.encode(x, seed), least, least, _SMAQ_BITS)


def _smaq_decode(place: Place) -> Subject:
    packed = smaq.encode(place.normal(1), torch.tensor(1))
    least = place.bytes + SMAQ.packed_bytes(place.count)
    return Subject(lambda: smaq.decode(packed, place.count, place.dtype), least, least, _SMAQ_BITS)


def _sketch(kind: sketch.Kind) -> Callable[[Place], Subject]:
    def subject(place: Place) -> Subject:
        seed = torch.tensor(1)

        def rows() -> Tensor:
            return sketch.sketch_rows(seed, 0, place.rows, place.columns, kind, place.dtype, place.device)

        def exact() -> Tensor:
            return torch.randn(place.rows, place.columns, dtype=place.dtype, device=place.device)

        return Subject(rows, place.bytes, place.bytes, None, "randn", exact)

    return subject


def _layer(exact: nn.Module) -> Callable[[Place], Subject]:
    name = type(exact).__name__

    def subject(place: Place) -> Subject:
        x, grad = place.normal(1).requires_grad_(), place.normal(2)
        steps = piecewise.relu() if name == "ReLU" else table(function_of(exact), place.bits)
        layer = StepwiseActivation(exact, steps, name, x.detach())
        bits = layer.steps.bits

        def step(module: LayerLike) -> Call:
            return lambda: torch.autograd.grad(module(x), x, grad)

        least = 4 * place.bytes + 2 * place.codes(bits)
        moved = least + (0 if _one_pass(name.lower(), place) else place.bytes)
        return Subject(step(layer), moved, least, bits, f"nn.{name}", step(exact), (exact, step))

    return subject


SUBJECTS: dict[str, Callable[[Place], Subject]] = {
    "layer:gelu": _layer(nn.GELU()),
    "layer:silu": _layer(nn.SiLU()),
    "layer:relu": _layer(nn.ReLU()),
    "stepwise_activate": _activate,
    "stepwise_encode": _encode,
    "stepwise_decode": _decode,
    "relu_mask": _relu,
    "mask_select": _select,
    "pack_codes": _pack,
    "unpack_codes": _unpack,
    "groupquant_encode": _grouped_encode,
    "groupquant_decode": _grouped_decode,
    "smaq_encode": _smaq_encode,
    "smaq_decode": _smaq_decode,
    "sketch_rademacher": _sketch("rademacher"),
    "sketch_gaussian": _sketch("gaussian"),
}
"""The operators that can be measured, by name; ``layer:`` is forward and backward of a converted layer."""
