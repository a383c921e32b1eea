"""Inputs in few bits with channels of outliers whole: bytes, no bias, and what is exact."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.measuring import bench
from actbench.methods.hyclora import OutlierChannels
from actbench.model.records import Case
from actbench.packing import SiteState
from actbench.packing.layout import Layout
from actbench.testing import check_scheme


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def unpacked(codec: OutlierChannels, x: Tensor) -> Tensor:
    layout = Layout.of(x)
    return codec.unpack(codec.pack(x.reshape(-1), layout, SiteState("", 8)), layout)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_have_their_bytes_and_outliers_are_exact(bits: int, dtype: torch.dtype) -> None:
    x, codec = torch.randn(4, 50, 96, dtype=dtype), OutlierChannels(bits, 0.02, 64, True)
    x[..., 7] *= 100
    x[..., 50] -= 80
    layout = Layout.of(x)
    parts = codec.pack(x.reshape(-1), layout, SiteState("", 8))
    back = codec.unpack(parts, layout)

    expected = 19200 * bits // 8 + 4 * 300 + 2 * (200 * dtype.itemsize + 4)
    assert sum(part.nbytes for part in parts) == expected == codec.packed_bytes(layout)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    assert torch.equal(back[..., [7, 50]], x[..., [7, 50]])
    others = [channel for channel in range(96) if channel not in (7, 50)]
    steps = 10 / (2**bits - 1)  # no group of normal numbers is wider than 10
    assert float((back - x)[..., others].abs().max()) <= steps


def test_outliers_that_stay_whole_leave_the_others_their_precision() -> None:
    x = torch.randn(200, 128)
    x[:, 3] *= 1000
    inside = [channel for channel in range(128) if channel != 3]

    def error(outliers: float) -> float:
        found = unpacked(OutlierChannels(4, outliers, 128, True), x)
        return float((found - x)[:, inside].norm() / x[:, inside].norm())

    apart = error(0.005)
    x[:, 3] /= 1000
    assert apart < 1.2 * error(0.005)
    assert apart < 0.2


def test_the_mean_over_draws_is_the_tensor() -> None:
    x, codec = torch.randn(30, 32), OutlierChannels(2, 0.05, 32, True)
    draws = torch.stack([unpacked(codec, x) for _ in range(400)])

    assert float((draws.mean(0) - x).norm() / x.norm()) < 3 * float((draws[0] - x).norm() / x.norm()) / math.sqrt(400)


def test_only_the_weight_s_gradient_is_estimated() -> None:
    exact, x = nn.Sequential(Doubled(), nn.Linear(64, 6)), torch.randn(50, 64)
    layer = converted(exact, "hyclora:4")

    for_x, for_weight, for_bias = gradients(layer, x)
    wanted = gradients(exact, x)

    assert torch.equal(layer(x), exact(x))
    torch.testing.assert_close([for_x, for_bias], [wanted[0], wanted[2]])
    assert 0.01 < float((for_weight - wanted[1]).norm() / wanted[1].norm()) < 0.3


@pytest.mark.slow
def test_of_a_model_with_adapters_the_inputs_of_adapters_are_packed() -> None:
    fields = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    plain, packed = (bench.Session(Case(**fields, scheme=spec)) for spec in ("lora:4", "lora:4+hyclora:2"))  # type: ignore[arg-type]
    saved, fewer = plain.memory().activation_bytes, packed.memory().activation_bytes

    converted_layers = {
        site.path.rpartition(".")[0].rpartition(".")[2] for site in packed.setup.sites if "bits" in site.becomes
    }
    assert {"lora_A", "lora_B"} <= converted_layers
    # two blocks of 256 tokens: q, k and v share an input of 64, gate and up one, and down has one of 256; attention
    # itself saves the input of o
    inputs = 2 * 256 * (2 * 64 + 256)
    assert saved is not None
    assert fewer is not None
    assert saved - fewer > 0.85 * 4 * inputs


@pytest.mark.parametrize("spec", ["hyclora:9", "hyclora:0", "hyclora,outliers=0", "hyclora,group_size=48"])
def test_wrong_values_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        schemes.build(spec)


@pytest.mark.exhaustive
def test_the_contract_of_schemes_holds() -> None:
    check_scheme("hyclora:4")
    check_scheme("lora:4+hyclora:8", parts=("mean gradient", "simulation", "packed bytes", "second derivative"))
