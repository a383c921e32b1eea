"""A network that calls its activations has, compiled, the gradients of its twin that holds them, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from calledtwins import SHAPES, SPECS, converted, converted_twins, equal, gradients
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.methods.compile.forward import CompiledForward
from actbench.scheme.setup import TrainingSetup

COMPILED = [
    *((spec, backend, None) for spec in SPECS for backend in ("aot_eager", "inductor")),
    *((spec, "aot_eager", "0.5") for spec in SPECS),
    ("fewbit:3", "inductor", "0.5"),
]


@pytest.mark.parametrize(
    ("spec", "backend", "budget"),
    [
        pytest.param(*each, marks=() if each == ("fewbit:3", "aot_eager", None) else pytest.mark.sampled(slow=3))
        for each in COMPILED
    ],
)
def test_compiled_networks_have_the_gradients_of_layers_uncompiled(
    spec: str, backend: str, budget: str | None, seeded: None
) -> None:
    torch._dynamo.reset()
    called, held = converted_twins(spec)
    run: Any = called
    if budget is None:
        run = torch.compile(called, backend=backend, fullgraph=True)
    else:
        named = "inductor" if backend == "inductor" else "aot_eager_decomp_partition"
        schemes.build(f"compile:{budget},backend={named}").apply(TrainingSetup(called))
        assert CompiledForward.of(called) is not None
    for _ in range(3):  # other draws through the same graph
        x = torch.randn(SHAPES[0])
        expected = gradients(held, x)
        rounding = 1e-5 * max(float(each.abs().max()) for each in expected)
        for found, same in zip(gradients(called, x, run), expected, strict=True):
            torch.testing.assert_close(found, same, rtol=1e-3, atol=rounding)
    torch._dynamo.reset()


class Leaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.linear(x), 0.3)


def test_arguments_of_a_call_under_compile(seeded: None) -> None:
    torch._dynamo.reset()
    exact, x = nn.Sequential(Leaks(), Leaks()), torch.randn(4, 8)
    model = converted(copy.deepcopy(exact), "fewbit:3")
    expected = gradients(exact, x)  # of one bit, which is exact

    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(gradients(model, x, run), expected)
    assert equal(gradients(model, x), expected)  # makes layers of its own
    assert equal(gradients(model, x, run), expected)
    torch._dynamo.reset()


class Hard(Leaks):
    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(self.linear(x))


def test_calls_that_compilers_hide_are_refused_where_they_have_another_gradient() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    model = converted(nn.Sequential(Hard(), Hard()), "fewbit:3")
    with pytest.raises(ConversionError, match=r"code calls F\.hardswish cannot be compiled: .* layers in place"):
        torch.compile(model, backend="aot_eager")(x)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), model(x))
    left = converted(nn.Sequential(Hard(), nn.GELU()), "fewbit:3,functions=gelu")
    torch.compile(left, backend="aot_eager", fullgraph=True)(x)
    with pytest.raises(ConversionError, match=r"F\.hardswish"):
        schemes.build("fewbit:3+compile:1,backend=aot_eager_decomp_partition").apply(
            TrainingSetup(nn.Sequential(Hard()))
        )
    torch._dynamo.reset()
