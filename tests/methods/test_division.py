"""Layers that keep means of blocks and differences in few bits: bytes, layouts, and no bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.methods.division import OfPictures, TwoFrequencies
from actbench.packing import SavedTensors, SiteState
from actbench.packing.layout import Layout, flat_of
from actbench.scheme.setup import TrainingSetup

DRAWS = 200
FAR = 4.5
"""Standard errors that no mean of a right estimate is off by."""


def test_what_is_constant_in_blocks_comes_back_whole() -> None:
    site, means = OfPictures("", 2), torch.randn(2, 3, 3, 2)
    x = F.interpolate(means, scale_factor=8)
    codec = TwoFrequencies(8, 2).at(x, site)

    back = codec.unpack(codec.pack(x.view(-1), Layout.of(x), site), Layout.of(x))

    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "kind", "means", "groups"),
    [
        ((4, 3, 16, 24), OfPictures, 4 * 3 * 2 * 3, 4 * 3),
        ((4, 3, 9, 17), OfPictures, 4 * 3 * 2 * 3, 4 * 3),
        ((4, 3, 100), OfPictures, 4 * 3 * 13, 4 * 3),
        ((2, 3, 5, 16, 16), OfPictures, 2 * 3 * 5 * 2 * 2, 2 * 3 * 5),
        ((4, 20, 64), SiteState, 4 * 3 * 64, 4 * 20),
        ((4, 7, 64), SiteState, 4 * 64, 4 * 7),
        ((20, 64), SiteState, 20 * 8, 20),
    ],
)
def test_bytes_have_a_closed_form(shape: Any, kind: Any, means: int, groups: int, dtype: torch.dtype) -> None:
    x, site = torch.randn(shape, dtype=dtype), kind("", 2)
    codec, layout = TwoFrequencies(8, 2).at(x, site), Layout.of(x)

    parts = codec.pack(x.view(-1), layout, site)
    found = sum(part.nbytes for part in parts)

    codes = groups * 2 * -(-(x.numel() // groups) // 8)
    assert found == codec.packed_bytes(layout) == means * dtype.itemsize + codes + 4 * groups
    assert (codec.unpack(parts, layout) - x).abs().max() < 4


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: x.to(memory_format=torch.channels_last)])
def test_the_mean_over_many_draws_is_the_tensor(lay: Any) -> None:
    x, site = lay(torch.randn(2, 4, 11, 9) + torch.linspace(-3, 3, 9)), OfPictures("", 2)
    codec, layout = TwoFrequencies(8, 2).at(x, site), Layout.of(x)

    draws = torch.stack([codec.unpack(codec.pack(flat_of(x), layout, site), layout) for _ in range(DRAWS)]).double()

    assert draws[0].stride() == x.stride()
    assert (draws.std(0) > 0.1).double().mean() > 0.8
    assert far_off((draws - x).flatten(1)) < FAR


def far_off(errors: Tensor) -> float:
    """Return by how many standard errors the mean over draws (dimension 0) is off at most, in 20 random sums."""
    signs = 2.0 * torch.randint(0, 2, (errors.shape[1], 20), generator=torch.Generator().manual_seed(2)) - 1
    sums = errors @ signs.double()
    return float((sums.mean(0) / (sums.std(0) / DRAWS**0.5)).abs().max())


LAYERS = {
    "linear": (lambda: nn.Linear(64, 6), (9, 20, 64)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (3, 4, 18, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (3, 4, 18, 16)),
}


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_weight_has_its_gradient_on_average_and_all_else_is_exact(kind: str) -> None:
    make, shape = LAYERS[kind]
    exact, x = nn.Sequential(Doubled(), make()), torch.randn(shape)
    layer, wanted = converted(exact, "division"), gradients(exact, x)

    draws = [gradients(layer, x) for _ in range(DRAWS)]

    assert torch.equal(layer(x), exact(x))
    torch.testing.assert_close([draws[0][0], draws[0][2]], [wanted[0], wanted[2]])
    errors = torch.stack([draw[1] for draw in draws]).double().flatten(1) - wanted[1].flatten()
    assert errors.norm(dim=1).min() > 0.01 * wanted[1].norm()
    assert far_off(errors) < FAR


def test_another_view_of_what_is_packed_is_the_same_tensor() -> None:
    x, packer = torch.randn(4, 3, 16, 16), SavedTensors(TwoFrequencies(8, 2))
    picture = packer.pack(x, OfPictures("", 2))
    flat = packer.pack(x.flatten(1), SiteState("", 2))

    assert flat.parts[1].data_ptr() == picture.parts[1].data_ptr()
    assert torch.equal(flat.unpack(), picture.unpack().flatten(1))


def test_convolutions_norms_and_linear_layers_are_packed() -> None:
    exact = nn.Sequential(
        Doubled(), nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(8 * 14 * 14, 4),
    )  # fmt: skip
    setup = schemes.build("division").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))

    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(4, 3, 16, 16, requires_grad=True)})

    def pictures(channels: int, side: int) -> int:
        return 4 * channels * (side * side // 4 + 4 + 4 * (-(-side // 8)) ** 2)

    features = 8 * 14 * 14
    rows = 4 * (features // 4 + 4 * 2 + 4 * features // 8)
    packed = sorted(entry.kept_bytes for entry in ledger.entries if entry.packed)
    assert packed == sorted([pictures(3, 16), pictures(8, 16), pictures(8, 16), 4 * 8 * 256 // 8, rows])


def test_a_model_without_layers_and_one_that_packs_already_are_refused() -> None:
    with pytest.raises(ConversionError, match="has no layer to convert; it holds"):
        converted(nn.Sequential(nn.Tanh()), "division")
    with pytest.raises(ConversionError, match="division: the model packs its saved tensors already"):
        converted(converted(nn.Sequential(nn.Linear(8, 8)), "actnn"), "division")
