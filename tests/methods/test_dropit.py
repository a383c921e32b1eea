"""Layers that keep the largest elements of their inputs: bytes, and which gradients are exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.methods.dropit import Largest
from actbench.packing.layout import Layout
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme

LAYERS = {
    "linear": (lambda: nn.Linear(40, 6), (5, 7, 40)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (3, 4, 9, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (3, 4, 9, 8)),
}


def largest(x: Tensor, share: float) -> Tensor:
    count = math.ceil(share * x.numel())
    return x.masked_fill(x.abs() < x.abs().flatten().sort(descending=True).values[count - 1], 0)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_the_weight_learns_from_the_largest_elements_and_all_else_is_exact(kind: str, share: float) -> None:
    make, shape = LAYERS[kind]
    exact, x = nn.Sequential(Doubled(), make()), torch.randn(shape)
    layer = converted(exact, f"dropit:{share}")

    for_x, for_weight, for_bias = gradients(layer, x)
    wanted = gradients(exact, x)

    assert torch.equal(layer(x), exact(x))
    torch.testing.assert_close([for_x, for_bias], [wanted[0], wanted[2]])
    torch.testing.assert_close(for_weight, gradients(exact, largest(x, share))[1])
    assert not torch.allclose(for_weight, wanted[1], rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lay", [lambda x: x, lambda x: x.to(memory_format=torch.channels_last)])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_values_and_a_bit_an_element_are_kept(share: float, lay: object, dtype: torch.dtype) -> None:
    x = lay(torch.randn(3, 5, 7, 9, dtype=dtype))  # type: ignore[operator]
    x[0, 0, 0, 0] = math.inf
    codec, layout = Largest(share), Layout.of(x)
    flat = x.permute(layout.order or (0, 1, 2, 3)).reshape(-1)
    parts = codec.pack(flat, layout, None)  # type: ignore[arg-type]
    back = codec.unpack(parts, layout)

    assert sum(part.nbytes for part in parts) == math.ceil(share * 945) * dtype.itemsize + math.ceil(945 / 8)
    assert sum(part.nbytes for part in parts) == codec.packed_bytes(layout)
    assert (back.stride(), int((back != 0).sum())) == (x.stride(), math.ceil(share * 945))
    assert torch.equal(back[back != 0], x[back != 0])
    assert back.abs()[back != 0].min() >= x.abs()[back == 0].max()


def test_the_bytes_of_a_model_are_those_of_its_inputs() -> None:
    exact = nn.Sequential(
        Doubled(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    )
    setup = schemes.build("dropit:0.25").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(32, 64, requires_grad=True)})
    packed = [entry for entry in ledger.entries if entry.packed]

    elements = 32 * 64
    assert sorted(entry.kept_bytes for entry in packed) == sorted([elements // 8] + 3 * [elements + elements // 8])
    assert type(setup.module[4]) is nn.LayerNorm  # type: ignore[index]


def test_a_model_of_norms_alone_and_one_that_packs_already_are_refused() -> None:
    with pytest.raises(ConversionError, match="has no layer to convert; it holds"):
        converted(nn.Sequential(nn.LayerNorm(8), nn.Tanh()), "dropit")
    with pytest.raises(ConversionError, match="dropit: the model packs its saved tensors already"):
        converted(converted(nn.Sequential(nn.Linear(8, 8)), "actnn"), "dropit")


def test_back_razor_keeps_the_largest_of_whatever_is_saved() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Softmax(-1), nn.Linear(64, 8))
    setup = schemes.build("backrazor:0.25").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(32, 64, requires_grad=True)})

    elements = 32 * 64
    packed = [entry.kept_bytes for entry in ledger.entries if entry.packed]
    assert sorted(packed)[1:] == 4 * [elements + elements // 8]  # the last layer reads softmax's output


class Product(nn.Module):
    """A product of two activations, and a bias, without which there would be nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x) @ (3 * x.flip(0)).mT + self.bias


@pytest.mark.parametrize("shape", [(4, 16, 20), (3, 5, 7, 9)])
def test_back_razor_takes_a_product_s_gradient_from_the_largest_elements(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    weights = torch.randn((*shape[:-1], shape[-2]), generator=torch.Generator().manual_seed(1))
    first, second = largest(2 * x, 0.3), largest(3 * x.flip(0), 0.3)

    for_x, for_bias = gradients(converted(Product(), "backrazor:0.3"), x)

    torch.testing.assert_close(for_x, 2 * weights @ second + 3 * (weights.mT @ first).flip(0))
    torch.testing.assert_close(for_bias, weights.sum()[None])


class Applied(nn.Module):
    """A function of activations, and a bias."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.bias = function, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + self.bias


QUOTIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softsign": F.softsign,
    "divisor": lambda x: x / (1 + x.abs()),
    "divided by in place": lambda x: (2 * x).div_(1 + x.abs()),
    "named": lambda x: torch.div(input=x, other=1 + x.abs()),
    "reciprocal": lambda x: 1 / (x.abs() + 0.1),
    "root": lambda x: (x * x + 0.1).sqrt(),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "logarithm": lambda x: (x.abs() + 0.1).log(),
    "power": lambda x: (x * x + 0.1) ** 0.5,
    "power of two tensors": lambda x: torch.pow(x.abs() + 0.1, x.sigmoid()),
    "response norm": lambda x: F.local_response_norm(x[None], 3)[0],
    "entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)),
}


@pytest.mark.parametrize("kind", QUOTIENTS)
def test_back_razor_leaves_whole_what_backward_divides_by(kind: str) -> None:
    exact, x = nn.Sequential(Doubled(), Applied(QUOTIENTS[kind])), torch.randn(20, 40)

    wanted, found = (gradients(each, x)[0] for each in (exact, converted(exact, "backrazor:0.1")))

    assert bool(found.isfinite().all())
    assert float((found - wanted).norm()) < 1.2 * float(wanted.norm())  # dropped elements count as zero


def test_back_razor_drops_elements_of_squares_and_of_what_is_divided() -> None:
    """They are finite at 0."""
    setup = schemes.build("backrazor:0.25").apply(
        TrainingSetup(
            nn.Sequential(Doubled(), nn.Linear(64, 64), Applied(lambda x: x.pow(2) / (1 + x.detach().abs()))),
            loss=lambda module, x: module(x["x"]).sum(),
        )
    )
    entries = inspection.itemize(setup, lambda: {"x": torch.randn(32, 64, requires_grad=True)}).entries

    whole = [entry for entry in entries if not entry.packed and entry.kept_bytes >= 4 * 32 * 64]
    assert len([entry for entry in entries if entry.packed]) == 2  # the linear layer's input, and what is squared
    assert [entry.reason for entry in whole] == ["the backward pass divides by it"]


@pytest.mark.slow
def test_back_razor_fulfils_the_contract_of_schemes() -> None:
    check_scheme("backrazor:0.25")
