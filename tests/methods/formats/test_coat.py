"""Saved tensors in 8-bit floats: one scale for what products save, one a group elsewhere."""

from __future__ import annotations

import pytest
import torch
from givenlayers import Doubled, converted
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.measuring import inspection
from actbench.methods.formats.coat import MixedGranularity
from actbench.packing import SiteState
from actbench.packing.layout import Layout
from actbench.scheme.setup import TrainingSetup


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer(x.clone().requires_grad_()).square().sum().backward()
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


LAYERS = {
    "linear": (lambda: nn.Linear(64, 64), (9, 64), True),
    "Conv1D": (lambda: Conv1D(64, 64), (9, 64), True),
    "convolution": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 9, 8), True),
    "norm": (lambda: nn.LayerNorm(64), (9, 64), False),
    "activation": (nn.PReLU, (9, 64), False),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_product_saves_has_one_scale_and_all_else_one_a_group(kind: str, dtype: torch.dtype) -> None:
    make, shape, is_product = LAYERS[kind]
    exact = nn.Sequential(Doubled(), make()).to(dtype)
    elements = torch.Size(shape).numel()
    setup = schemes.build("coat").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).float().sum()))

    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(shape, dtype=dtype, requires_grad=True)})

    (entry,) = (entry for entry in ledger.entries if entry.packed)
    assert entry.kept_bytes == elements + (4 if is_product else 2 * -(-elements // 16))


@pytest.mark.parametrize("product", [True, False])
def test_values_come_back_to_an_eighth_of_their_power_of_two_where_their_scale_reaches(product: bool) -> None:
    x = torch.randn(40, 16) * torch.logspace(0, -12, 40)[:, None]
    site = SiteState("", 8, product=product)
    codec, layout = MixedGranularity(16).at(x, site), Layout.of(x)

    parts = codec.pack(x.view(-1), layout, site)
    error = (codec.unpack(parts, layout) - x).norm(dim=1) / x.norm(dim=1)

    assert sum(part.nbytes for part in parts) == codec.packed_bytes(layout)
    assert error[:5].max() < 0.05  # half a step of 3 bits is a 16th of a power of two at most
    assert (error[-5:] == 1).all() if product else error.max() < 0.05


def test_gradients_are_near_the_exact_ones_in_recomputed_blocks_too() -> None:
    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())  # noqa: E731
    exact, x = nn.Sequential(Doubled(), block(), block(), nn.Linear(64, 8)), torch.randn(32, 64)
    wanted, found = gradients(exact, x), gradients(converted(exact, "coat"), x)
    again = gradients(converted(exact, "coat+checkpoint,blocks=Sequential,only=1/2"), x)

    for truth, each in zip(wanted, found, strict=True):
        assert 0 <= (each - truth).norm() < 0.06 * truth.norm() + 1e-5
    assert any(not torch.equal(truth, each) for truth, each in zip(wanted, found, strict=True))
    for truth, each in zip(wanted, again, strict=True):
        assert (each - truth).norm() < 0.06 * truth.norm() + 1e-5


def test_selective_is_refused_before_anything_runs() -> None:
    with pytest.raises(SpecError, match="coat and selective both choose by the operator"):
        schemes.build("coat+selective")
