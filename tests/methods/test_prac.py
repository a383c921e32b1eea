"""Inputs in a principal and a random subspace: bytes, no bias, and which gradients are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.measuring import inspection
from actbench.methods.prac import Subspaces
from actbench.packing import SiteState
from actbench.packing.layout import Layout
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def packed(codec: Subspaces, x: Tensor) -> tuple[Tensor, ...]:
    return codec.pack(x.reshape(-1), Layout.of(x), SiteState("", 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parts_have_their_bytes_and_coordinates_are_those_of_orthonormal_bases(dtype: torch.dtype) -> None:
    x, codec = torch.randn(4, 50, 40, dtype=dtype), Subspaces(0.5, 0.5)
    layout = Layout.of(x)
    coordinates, main, seed = packed(codec, x)

    assert coordinates.shape == (200, 20)
    assert main.shape == (40, 10)
    found = sum(part.nbytes for part in (coordinates, main, seed))
    assert found == dtype.itemsize * (200 * 20 + 40 * 10) + 8 == codec.packed_bytes(layout)
    rest = codec._complement(main, 10, seed)
    both = torch.cat((main, rest), 1).double()
    torch.testing.assert_close(
        both.t() @ both, torch.eye(20).double(), rtol=0, atol=0.02 if dtype.itemsize == 2 else 1e-5
    )
    back = codec.unpack((coordinates, main, seed), layout)
    assert (back.shape, back.dtype) == (x.shape, dtype)
    flat = x.view(-1, 40).double()
    expected = flat @ main.double() @ main.double().t() + 3 * flat @ rest.double() @ rest.double().t()
    torch.testing.assert_close(back.view(-1, 40).double(), expected, rtol=0, atol=0.3 if dtype.itemsize == 2 else 1e-4)


def test_the_mean_over_draws_is_the_tensor() -> None:
    x, codec = torch.randn(30, 16) @ torch.diag(torch.linspace(3, 0.1, 16)), Subspaces(0.5, 0.5)
    draws = torch.stack([codec.unpack(packed(codec, x), Layout.of(x)) for _ in range(600)]).double()
    standard_errors = (draws.mean(0) - x) / (draws.std(0) / 600**0.5)

    assert float(standard_errors.abs().max()) < 5
    assert float(standard_errors.square().mean()) == pytest.approx(1, abs=0.35)
    assert float((draws.mean(0) - x).norm() / x.norm()) < 0.06


def test_principal_directions_lower_the_error_of_inputs_that_have_some() -> None:
    x = torch.randn(200, 4) @ torch.randn(4, 64) + 0.01 * torch.randn(200, 64)

    def error(principal: float) -> float:
        codec = Subspaces(0.25, principal)
        draws = [codec.unpack(packed(codec, x), Layout.of(x)) - x for _ in range(8)]
        return float(torch.stack(draws).norm(dim=(1, 2)).mean() / x.norm())

    assert error(0.5) < 0.05 * error(0.01)


@pytest.mark.slow
def test_only_the_weight_s_gradient_is_estimated() -> None:
    exact, x = nn.Sequential(Doubled(), nn.Linear(40, 6)), torch.randn(50, 40)
    layer = converted(exact, "prac:0.5")

    for_x, for_weight, for_bias = gradients(layer, x)
    wanted = gradients(exact, x)

    assert torch.equal(layer(x), exact(x))
    torch.testing.assert_close([for_x, for_bias], [wanted[0], wanted[2]])
    assert not torch.allclose(for_weight, wanted[1], rtol=0.01)
    mean = torch.stack([gradients(layer, x)[1] for _ in range(400)]).mean(0)
    assert float((mean - wanted[1]).norm() / wanted[1].norm()) < 0.15


def test_the_bytes_of_a_model_are_those_of_its_inputs_and_short_ones_stay_whole() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    setup = schemes.build("prac:0.5").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))

    def kept(rows: int) -> list[int]:
        ledger = inspection.itemize(setup, lambda: {"x": torch.randn(rows, 64, requires_grad=True)})
        return [entry.kept_bytes for entry in ledger.entries if entry.packed]

    assert kept(128) == 2 * [4 * (128 * 32 + 64 * 16) + 8]
    assert kept(16) == []


@pytest.mark.parametrize("spec", ["prac:0", "prac:1", "prac,principal=1"])
def test_wrong_values_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        schemes.build(spec)


@pytest.mark.exhaustive
def test_the_contract_of_schemes_holds() -> None:
    check_scheme("prac:0.5")
    check_scheme("lora:4+prac:0.25", parts=("mean gradient", "simulation", "packed bytes", "second derivative"))
