"""What NaN and infinite inputs do to derivatives: few bits have no code for them, all that is packed else keeps NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import actbench
from actbench import scheme as schemes
from actbench.methods.fewbit.ops import stepwise
from actbench.methods.fewbit.tables import table

NAN, INF = math.nan, math.inf


def derivatives(layer: nn.Module, values: tuple[float, ...]) -> Tensor:
    x = torch.tensor(values).repeat(40)  # vectors and a rest
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    found = x.grad.view(40, len(values))
    assert torch.equal(found.nan_to_num(7.0), found[:1].expand(40, -1).nan_to_num(7.0))
    return found[0]


@pytest.mark.parametrize("bits", [1, 3, 5])
@pytest.mark.parametrize(
    ("layer", "function"),
    [(nn.GELU(), "gelu"), (nn.SiLU(), "silu"), (nn.Mish(), "mish"), (nn.Tanh(), "tanh")],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_nan_has_the_first_level_and_infinities_the_outermost(layer: nn.Module, function: str, bits: int) -> None:
    found = derivatives(actbench.convert(nn.Sequential(layer), f"fewbit:{bits}"), (NAN, INF, -INF))

    levels = torch.tensor(table(function, bits).levels)
    assert torch.equal(found, levels[[0, -1, -1 if function == "tanh" else 0]])  # an even derivative is folded
    assert derivatives(layer, (NAN,)).isnan()


@pytest.mark.parametrize(("layer", "scheme"), [(nn.GELU(), "regelu2"), (nn.SiLU(), "resilu2")], ids=str)
def test_sums_of_relus_have_their_outer_slopes(layer: nn.Module, scheme: str) -> None:
    found = derivatives(actbench.convert(nn.Sequential(layer), scheme), (NAN, INF, -INF))

    assert found.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "layer", [nn.ReLU(), nn.LeakyReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid(), nn.Softshrink()], ids=str
)
def test_derivatives_of_one_bit_are_those_of_torch(layer: nn.Module) -> None:
    values = (NAN, INF, -INF, 0.0, 1.0, -1.0)
    found = derivatives(actbench.convert(nn.Sequential(layer), "fewbit:1"), values)

    assert torch.equal(found.nan_to_num(7.0), derivatives(layer, values).nan_to_num(7.0))


@pytest.mark.parametrize("layer", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()], ids=str)
def test_an_inverted_activation_keeps_nan(layer: nn.Module) -> None:
    assert derivatives(actbench.convert(nn.Sequential(layer), "invact"), (NAN,)).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [2, 6])
def test_every_kernel_gives_nan_the_code_of_the_reference(bits: int, dtype: torch.dtype) -> None:
    bounds = torch.linspace(-2, 2, 2**bits - 1)
    x = torch.tensor([NAN, INF, -INF, -NAN]).repeat(30).to(dtype)

    for fold in (False, True):
        assert torch.equal(stepwise.encode(x, bounds, bits, fold), stepwise.encode_reference(x, bounds, bits, fold))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


def not_finite(model: nn.Module, value: float) -> set[str]:
    """Return the parameters whose gradients are not finite if one row, which the loss leaves out, is not."""
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    x[0, 3] = value
    F.cross_entropy(model(x)[1:], torch.arange(63) % 4).backward()
    return {name for name, each in model.named_parameters() if each.grad is not None and not each.grad.isfinite().all()}


NAMES = {"dropit": "dropit:0.5", "division": "division:8", "encode": "encode:int:6", "fewbit": "fewbit:3"}
NAMES |= {"gact": "gact:L1", "randomized": "randomized:0.5", "velora": "velora:8"}
PACKING = [
    NAMES.get(name, name)
    for name in schemes.alone()
    if "saved tensors" in schemes.lookup(name).model_construct().changes and name not in ("liger", "resilu2")
]


@pytest.mark.filterwarnings("ignore:.*optimizer state stays as it is")
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("spec", PACKING)
def test_gradients_that_are_not_finite_are_so_under_each_scheme_that_packs(spec: str, value: float) -> None:
    exact, found = not_finite(network(), value), not_finite(actbench.convert(network(), spec), value)

    # a table has no code for NaN, so the sum of the activation's gradient is a number
    lost = {"1.bias"} if spec in ("fewbit:3", "regelu2") else set()
    assert "1.bias" in exact
    assert found == exact - lost
