"""Linear layers that keep inputs in 8-bit floats: bytes, error, and what torchao's float8 training keeps instead."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from givenlayers import Doubled, converted, gradients
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from actbench import scheme as schemes
from actbench.errors import ConversionError, SpecError
from actbench.measuring import inspection
from actbench.methods.formats.float8 import ScaledFloat8, Scaling
from actbench.packing import SiteState
from actbench.packing.layout import Layout, flat_of
from actbench.scheme.setup import TrainingSetup
from actbench.testing import check_scheme


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("x", "scaling", "scales"),
    [
        (torch.randn(3, 7, 40), "tensorwise", 1),
        (torch.randn(3, 7, 40), "rowwise", 21),
        (torch.randn(13, 53), "rowwise", 13),
        (torch.randn(7, 3, 40).transpose(0, 1), "rowwise", 21),
        (torch.randn(3, 40, 7).transpose(1, 2), "rowwise", 1),  # its rows are not whole in memory
    ],
)
def test_a_byte_an_element_and_a_scale_are_kept(x: Tensor, scaling: Scaling, scales: int, dtype: torch.dtype) -> None:
    x, site = x.to(dtype), SiteState("", 8)
    codec, layout = ScaledFloat8(scaling).at(x, site), Layout.of(x)
    parts = codec.pack(flat_of(x), layout, site)
    back = codec.unpack(parts, layout)

    assert sum(part.nbytes for part in parts) == x.numel() + 4 * scales == codec.packed_bytes(layout)
    assert parts[0].dtype == torch.float8_e4m3fn
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), dtype)
    largest = x.abs().amax(-1, keepdim=True) if scales > 1 else x.abs().amax()
    bound = (2.0**-4 * x.abs()).maximum(largest * 2.0**-10 / 448) * 1.02 + 2.0**-8 * x.abs()
    assert bool(((back - x).abs() <= bound).all())


def test_rows_of_different_scale_keep_their_error_with_a_scale_each() -> None:
    exact = nn.Sequential(Doubled(), nn.Linear(64, 6))
    x = torch.randn(50, 64) * torch.logspace(-6, 0, 50)[:, None]
    small = x[:5]

    def error(scaling: str) -> float:
        site, layout = SiteState("", 8), Layout.of(x)
        codec = ScaledFloat8(scaling).at(x, site)  # type: ignore[arg-type]
        back = codec.unpack(codec.pack(x.view(-1), layout, site), layout)
        return float((back[:5] - small).norm() / small.norm())

    assert error("rowwise") < 0.04
    assert error("tensorwise") > 2 * error("rowwise")
    for_x, for_weight, for_bias = gradients(converted(exact, "float8:rowwise"), x)
    wanted = gradients(exact, x)
    torch.testing.assert_close([for_x, for_bias], [wanted[0], wanted[2]])
    assert 1e-4 < float((for_weight - wanted[1]).norm() / wanted[1].norm()) < 0.04


def test_a_row_that_a_scale_would_make_larger_stays_whole() -> None:
    assert ScaledFloat8("rowwise").why_not(torch.randn(100, 1)) is not None
    assert ScaledFloat8("tensorwise").why_not(torch.randn(100, 1)) is None


def test_the_bytes_of_a_model_are_those_of_its_inputs() -> None:
    exact = nn.Sequential(
        Doubled(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    )
    setup = schemes.build("float8:rowwise").apply(TrainingSetup(exact, loss=lambda module, x: module(x["x"]).sum()))
    ledger = inspection.itemize(setup, lambda: {"x": torch.randn(32, 64, requires_grad=True)})

    packed = sorted(entry.kept_bytes for entry in ledger.entries if entry.packed)
    assert packed == [32 * 64 // 8] + 3 * [32 * 64 + 4 * 32]


def test_torchao_s_float8_training_keeps_inputs_and_weights_as_they_were() -> None:
    """Its memory is the exact model's: it saves no 8-bit float."""
    exact = nn.Sequential(Doubled(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    theirs = convert_to_float8_training(copy.deepcopy(exact), config=Float8LinearConfig(emulate=True))

    def kept(module: nn.Module) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        found: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module(torch.randn(48, 64, requires_grad=True))
        return sorted((str(x.dtype), tuple(sorted(x.shape))) for x in found.values())  # type: ignore[misc]

    assert kept(theirs) == kept(exact)


@pytest.mark.parametrize("spec", ["float8:blockwise", "float8,format=e5m2"])
def test_wrong_values_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        schemes.build(spec)


def test_a_model_of_norms_alone_is_refused() -> None:
    with pytest.raises(ConversionError, match="has no layer to convert; it holds"):
        converted(nn.Sequential(nn.LayerNorm(8), nn.Tanh()), "float8")


@pytest.mark.slow
def test_the_contract_of_schemes_holds() -> None:
    check_scheme("float8")
    check_scheme("float8:rowwise", parts=("gradient", "simulation", "packed bytes"))
