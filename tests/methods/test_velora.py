"""Linear layers that keep sub-tokens as one number: bytes, which gradients are exact, and the vector that stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.measuring import inspection
from actbench.methods.velora import SubTokens, usual_size
from actbench.packing import SiteState
from actbench.packing.layout import Layout
from actbench.scheme.setup import TrainingSetup


def along(x: Tensor, vector: Tensor) -> Tensor:
    tokens = x.reshape(-1, len(vector))
    return torch.outer(tokens @ vector, vector).view(x.shape)


def direction(x: Tensor, size: int) -> Tensor:
    mean = x.reshape(-1, size).mean(0)
    return mean / mean.norm()


@pytest.mark.parametrize("make", [lambda: nn.Linear(40, 6), lambda: Conv1D(6, 40)])
@pytest.mark.parametrize("shape", [(9, 40), (5, 7, 40)])
def test_the_weight_learns_from_what_lies_along_the_vector_of_the_first_batch(
    make: Any, shape: tuple[int, ...]
) -> None:
    exact = nn.Sequential(Doubled(), make())
    layer = converted(exact, "velora:8")
    first, second = torch.randn(2, *shape)
    vector = direction(2 * first, 8)

    for x in (first, second):
        names = ["input", *(name for name, _ in exact.named_parameters())]
        found = dict(zip(names, gradients(layer, x), strict=True))
        truth = dict(zip(names, gradients(exact, x), strict=True))
        of_kept = dict(zip(names, gradients(exact, along(2 * x, vector) / 2), strict=True))

        assert torch.equal(layer(x), exact(x))
        torch.testing.assert_close(found, {**truth, "1.weight": of_kept["1.weight"]})
        assert not torch.allclose(found["1.weight"], truth["1.weight"], rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_a_sub_token_is_kept_and_rows_come_back_alone(dtype: torch.dtype) -> None:
    x, site = torch.randn(6, 5, 64, dtype=dtype), SiteState("", 4)
    codec, layout = SubTokens(8), Layout.of(x)
    parts = codec.pack(x.view(-1), layout, site)
    back = codec.unpack(parts, layout)

    assert sum(part.nbytes for part in parts) == 6 * 5 * 8 * dtype.itemsize + 4 * 8 == codec.packed_bytes(layout)
    torch.testing.assert_close(back.float(), along(x.float(), direction(x.float(), 8)), atol=0.03, rtol=0.03)
    torch.testing.assert_close(codec.rows(parts, layout, 2, 4), back[2:4])
    assert codec.pack(torch.randn_like(x).view(-1), layout, site)[1].data_ptr() == parts[1].data_ptr()


@pytest.mark.parametrize("first", [torch.zeros(4, 16), torch.full((4, 16), torch.nan)])
def test_a_first_batch_without_a_mean_leaves_a_vector_of_length_1(first: Tensor) -> None:
    site = SiteState("", 4)

    parts = SubTokens(4).pack(first.view(-1), Layout.of(first), site)

    torch.testing.assert_close(parts[1], torch.full((4,), 0.5))


def test_the_bytes_of_a_model_are_those_of_its_inputs() -> None:
    exact = nn.Sequential(
        Doubled(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    )
    setup = schemes.build("velora:16").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(32, 64, requires_grad=True)})
    packed = sorted(entry.kept_bytes for entry in ledger.entries if entry.packed)

    assert packed == [32 * 64 // 8] + 3 * [32 * 4 * 4 + 4 * 16]  # a bit an element; numbers and a vector
    assert type(setup.module[4]) is nn.LayerNorm  # type: ignore[index]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_recomputed_blocks_have_the_gradients_of_blocks_that_are_not(dtype: torch.dtype | None) -> None:
    exact = nn.Sequential(Doubled(), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    plain, recomputed = (converted(exact, f"velora:8{more}") for more in ("", "+checkpoint,blocks=Sequential,every=1"))

    for x in torch.randn(3, 16, 64):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            wanted, found = gradients(plain, x), gradients(recomputed, x)
        torch.testing.assert_close(found, wanted)


def test_copies_and_resumed_models_go_on_with_the_vector_and_no_key_is_added() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(64, 8))
    model, first, second = converted(exact, "velora:8"), torch.randn(9, 64), torch.randn(9, 64)
    gradients(model, first)
    other = converted(exact, "velora:8")
    other.forward.adapt(model.forward.adapted())

    wanted = gradients(model, second)

    assert list(model.state_dict()) == list(exact.state_dict())
    for twin in (copy.deepcopy(model), other):
        torch.testing.assert_close(gradients(twin, second), wanted)
    assert not torch.allclose(gradients(converted(exact, "velora:8"), second)[1], wanted[1])


def test_what_lies_in_another_order_is_left_as_it_is() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(16, 6))
    x = torch.randn(3, 16, 8).transpose(1, 2)

    torch.testing.assert_close(gradients(converted(exact, "velora:4"), x), gradients(exact, x))


@pytest.mark.parametrize(("features", "size"), [(4096, 128), (768, 24), (100, 4), (97, 97), (24, 2), (2, 2)])
def test_the_usual_size_is_a_32nd_or_the_next_divisor(features: int, size: int) -> None:
    assert usual_size(features) == size


def test_a_size_that_divides_no_row_and_a_model_without_linear_layers_are_refused() -> None:
    with pytest.raises(ConversionError, match="1 has 40 input features, which sub-tokens of 16 do not divide; take"):
        converted(nn.Sequential(Doubled(), nn.Linear(40, 6)), "velora:16")
    with pytest.raises(ConversionError, match="has no layer to convert; it holds"):
        converted(nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm(8)), "velora")
    with pytest.raises(ConversionError, match="velora: the model packs its saved tensors already"):
        converted(converted(nn.Sequential(nn.Linear(8, 8)), "actnn"), "velora")


def test_hooks_around_pack_the_numbers_once_more() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(256, 8))
    x = torch.randn(20_000, 256)
    alone, both = (converted(exact, spec) for spec in ("velora:64", "velora:64+gact:L1.1"))

    wanted, found = gradients(alone, x), gradients(both, x)

    assert 0 < (found[1] - wanted[1]).norm() < 0.05 * wanted[1].norm()
