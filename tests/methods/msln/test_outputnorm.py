"""Norms that save their output: bits, gradients, bytes, and weights that do not give the input back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.layers import norm as timm_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.methods.msln.outputnorm import FromOutput, NormFromOutput
from actbench.scheme.setup import TrainingSetup

NORMS = {
    "layer norm": lambda: nn.LayerNorm(64),
    "two dimensions": lambda: nn.LayerNorm((4, 64)),
    "without bias": lambda: nn.LayerNorm(64, bias=False),
    "without weights": lambda: nn.LayerNorm(64, elementwise_affine=False),
    "RMS norm": lambda: nn.RMSNorm(64),
    "with epsilon": lambda: nn.RMSNorm(64, eps=0.1, elementwise_affine=False),
    "of a Llama": lambda: LlamaRMSNorm(64),
    "RMS norm of timm": lambda: timm_norms.RmsNorm(64),
    "layer norm of timm": lambda: timm_norms.LayerNorm(64),
}
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.015}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def made(name: str) -> Any:
    norm: nn.Module = NORMS[name]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape) + 0.2).mul_(torch.randn(parameter.shape).sign())
    return norm


def converted(module: nn.Module, spec: str = "msln") -> Any:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(module))).module


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), [x, *module.parameters()]))


def kept(module: nn.Module, x: Tensor) -> int:
    """Return the bytes of what a pass saves, but for parameters; each storage once."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert y.requires_grad
    return sum(size for place, size in saved.items() if place not in own)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", EXACT)
def test_the_output_is_equal_to_the_bit_and_gradients_to_rounding(name: str, dtype: torch.dtype) -> None:
    exact = made(name).to(dtype)
    norm, x = converted(exact), (3 * torch.randn(8, 4, 64) + 1).to(dtype)

    assert norm(x.requires_grad_()).grad_fn.name().startswith("NormFromOutput")
    assert torch.equal(norm(x), exact(x))
    near = max(EXACT[dtype], EXACT[torch.float32] if name == "of a Llama" else 0)  # it computes in float32
    for found, wanted in zip(gradients(norm, x.detach()), gradients(exact, x.detach()), strict=True):
        assert found.dtype == wanted.dtype
        assert (found - wanted).double().norm() <= near * wanted.double().norm()


@pytest.mark.parametrize(
    ("name", "before"), [("layer norm", 2 * 9 * 256 + 2 * 9 * 4), ("of a Llama", 3 * 9 * 256 + 9 * 4)]
)
def test_the_linear_layer_behind_keeps_the_same_tensor(name: str, before: int) -> None:
    exact = nn.Sequential(nn.Linear(64, 64), made(name), nn.Linear(64, 8))
    x = torch.randn(9, 64)

    assert kept(exact, x) - x.nbytes == before
    assert kept(converted(exact), x) - x.nbytes == 9 * 256 + 9 * 4


@pytest.mark.parametrize("spoil", ["weight", "bias"])
def test_a_norm_whose_weights_lose_the_input_keeps_it(spoil: str) -> None:
    exact = nn.Sequential(nn.Linear(64, 64), made("layer norm"), made("layer norm"))
    model, x = converted(exact), torch.randn(9, 64)
    for spoiled in (exact, model):
        with torch.no_grad():
            spoiled[1].weight[3] = 1e-6 if spoil == "weight" else 0.1
            spoiled[1].bias[3] = 1.0 if spoil == "weight" else 100.0

    for found, wanted in zip(gradients(model, x), gradients(exact, x), strict=True):
        torch.testing.assert_close(found, wanted)
    assert type(converted(exact)[1]) is nn.LayerNorm
    assert type(converted(exact)[2]) is not nn.LayerNorm
    unreached = schemes.build("msln").apply(TrainingSetup(exact)).unreached
    assert [(place.path, place.reason[:20]) for place in unreached] == [("1", "some of its weights ")]


def test_without_the_guard_small_weights_would_spoil_the_gradient() -> None:
    exact = made("layer norm")
    with torch.no_grad():
        exact.weight[3], exact.bias[3] = 1e-7, 1.0
    x = torch.randn(9, 64, requires_grad=True)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, _, rstd = torch.native_layer_norm(x, (64,), exact.weight, exact.bias, exact.eps)
        return y, rstd

    (found,) = torch.autograd.grad(
        NormFromOutput.apply(x, exact.weight, exact.bias, run, True).square().sum(), exact.weight
    )
    (wanted,) = torch.autograd.grad(exact(x).square().sum(), exact.weight)
    assert not torch.allclose(found[3], wanted[3], rtol=0.01)


def test_an_output_that_is_changed_in_place_is_an_error() -> None:
    norm = converted(made("layer norm"))
    y = norm(torch.randn(9, 64, requires_grad=True))
    y.mul_(2)

    with pytest.raises(RuntimeError, match="msln keeps the output of norms"):
        y.sum().backward()


@pytest.mark.parametrize("around", ["checkpoint,blocks=Sequential", "gact:L1.1", "offload", "fewbit:3"])
def test_gradients_beside_other_schemes_are_those_of_these_alone(around: str) -> None:
    def block() -> nn.Module:
        return nn.Sequential(made("layer norm"), nn.Linear(64, 64), nn.GELU())

    exact, x = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), block(), block())])[0], torch.randn(64, 64)
    found, wanted = [], []
    for spec, into in ((f"{around}+msln", found), (around, wanted)):
        model = converted(exact, spec)
        model(x.clone().requires_grad_()).square().sum().backward()
        into.extend(parameter.grad for parameter in model.parameters())

    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= (0.05 if around == "gact:L1.1" else 1e-4) * other.norm() + 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_outputs_and_gradients_are_the_exact_layers(dtype: torch.dtype) -> None:
    exact, x = nn.Sequential(nn.Linear(64, 64), made("layer norm"), nn.Linear(64, 8)), torch.randn(9, 64)
    model = converted(exact)

    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(model(x), exact(x))
        for found, wanted in zip(gradients(model, x), gradients(exact, x), strict=True):
            assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("name", sorted(NORMS.keys() - {"two dimensions"}))
def test_under_autocast_linear_layers_share_an_output_that_is_cast(name: str) -> None:
    """Two layers behind a norm keep its output in bfloat16 once; the copies that they would make are those bits."""
    exact = nn.ModuleDict({"norm": made(name), "q": nn.Linear(64, 8), "v": nn.Linear(64, 8)})

    class Both(nn.Module):
        def __init__(self, parts: nn.ModuleDict) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.parts["norm"](x)
            return self.parts["q"](y) + self.parts["v"](y)

    plain, x = Both(exact), torch.randn(9, 64)
    model = converted(plain, "msln,cast=true")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), plain(x))
        shared = kept(model, x.clone().requires_grad_())
        for found, wanted in zip(gradients(model, x), gradients(plain, x), strict=True):
            assert (found - wanted).norm() < 0.02 * wanted.norm()
    weights = 2 * 8 * 64 * 2  # their copies in bfloat16
    assert shared == 9 * 64 * 2 + 9 * 4 + weights
    assert torch.equal(model(x), plain(x))  # without autocast nothing is cast


@pytest.mark.parametrize("refused", [False, True])
def test_a_norm_that_casts_returns_one_type_in_each_pass(refused: bool) -> None:
    norm, x = converted(made("layer norm"), "msln,cast=true"), torch.randn(9, 64)
    if refused:
        with torch.no_grad():
            norm.weight[3] = 0

    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded = norm(x)
        with torch.no_grad():
            plain = norm(x)
    assert recorded.requires_grad
    assert recorded.grad_fn.name().startswith("NormFromOutput") != refused
    assert recorded.dtype == plain.dtype == torch.bfloat16
    assert torch.equal(recorded, plain)
    norm.bfloat16()
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_a_norm_that_casts_keeps_the_exact_layers_type_without_autocast() -> None:
    exact, x = made("of a Llama"), torch.randn(9, 64).bfloat16()
    norm = converted(exact, "msln,cast=true")

    assert torch.equal(norm(x), exact(x))
    assert norm(x).dtype == exact(x).dtype == torch.float32


def test_a_reentrant_checkpoint_differentiates_the_pass_that_it_ran() -> None:
    """The second run, with autograd, returns the bits of the first, without: else gradients are of another pass."""
    outputs: list[Tensor] = []
    block = nn.Sequential(made("layer norm"), nn.Linear(64, 64))
    block[0].register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    model, x = converted(block, "msln,cast=true"), torch.randn(9, 64, requires_grad=True)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=True)
    y.float().square().sum().backward()

    first, second = outputs
    assert first.dtype == second.dtype == torch.bfloat16
    assert torch.equal(first, second)


def test_what_a_norm_computes_decides_and_not_its_name() -> None:
    class Scaling(LlamaRMSNorm):
        pass

    for norm in (T5LayerNorm(64), Scaling(64)):
        assert type(converted(nn.Sequential(norm))[0]).__mro__[1] is FromOutput


def test_a_class_that_computes_something_else_is_refused() -> None:
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 1.001 * super().forward(hidden_states)

    class ShiftedLayerNorm(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + 1

    others = (Gemma3RMSNorm(64), ScaledRMSNorm(64), CohereLayerNorm(64), timm_norms.RmsNorm2d(64))
    for norm in others:
        with pytest.raises(ConversionError, match=r"it does not compute w x / sqrt"):
            converted(nn.Sequential(norm))
    with pytest.raises(ConversionError, match=r"no norm to convert; 0 and 204 more: it does not compute [^;]*$"):
        converted(nn.Sequential(*(Gemma3RMSNorm(64) for _ in range(205))))
    for norm in (ShiftedLayerNorm(64), timm_norms.LayerNorm2d(64)):
        with pytest.raises(ConversionError, match=r"a subclass of nn\.LayerNorm that computes something else"):
            converted(nn.Sequential(norm))
    with pytest.raises(ConversionError, match="has no norm to convert; it holds 1 Linear"):
        converted(nn.Sequential(nn.Linear(4, 4)))


def test_a_norm_without_an_epsilon_has_that_of_the_type_it_sums_in() -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)).to(torch.bfloat16)
    x = 0.05 * torch.randn(8, 16, dtype=torch.bfloat16)  # the mean of whose squares is less than bfloat16's epsilon
    found = []
    for module in (exact, schemes.build("msln").apply(TrainingSetup(copy.deepcopy(exact))).module):
        given = x.clone().requires_grad_()
        module(given).square().sum().backward()
        assert given.grad is not None
        found.append(given.grad.float())

    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()
