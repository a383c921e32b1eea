"""A model is compiled under a memory budget, keeps less for it, and has the gradients of the uncompiled one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from compilednets import compiled, forward_of, gradients, read, setup_of, transformer
from torch import Tensor, nn

from actbench import scheme as schemes
from actbench.methods.compile.forward import CompiledForward

pytestmark = pytest.mark.usefixtures("alone")


def convolutions() -> nn.Module:
    layers = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


TRANSFORMER = (transformer, (4, 16, 32))
CONVOLUTIONS = (convolutions, (8, 8, 12, 12))


@pytest.mark.parametrize(
    ("make", "shape", "budgets"),
    [
        pytest.param(*TRANSFORMER, (1, 0), marks=pytest.mark.slow),
        pytest.param(*TRANSFORMER, (1, 0.7, 0.5, 0.3, 0.1, 0), marks=pytest.mark.exhaustive),
        pytest.param(*CONVOLUTIONS, (1, 0.5, 0), marks=pytest.mark.exhaustive),
    ],
)
def test_a_smaller_budget_keeps_less_and_gradients_stay(
    make: Callable[[], nn.Module], shape: tuple[int, ...], budgets: tuple[float, ...]
) -> None:
    exact, x = make(), torch.randn(shape)
    before = copy.deepcopy(exact.state_dict())
    wanted, kept = gradients(setup_of(exact), x), [read(setup_of(exact), x).activation_bytes]

    for budget in budgets:
        exact.load_state_dict(before)
        setup = compiled(copy.deepcopy(exact), f"compile:{budget}")
        found = gradients(setup, x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        reading = read(setup, x)
        kept.append(reading.activation_bytes)
        states = {name: tensor for name, tensor in setup.module.state_dict().items() if "num_batches" in name}
        assert all(int(count) == 3 for count in states.values())  # steps, of which each counts its batch once
        assert reading.loss == pytest.approx(setup_of(exact).forward({"x": x}).item())

    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert kept[-1] < kept[0] / 10  # what the loss outside of the graph reads


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_that_runs_again_drops_what_it_dropped(backend: str) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            self.out = nn.functional.dropout(self.weight.sin() * x, 0.5)
            return self.out.exp()

    for budget in (1, 0.1, 0):
        module = Drops()
        out = schemes.build(f"compile:{budget},backend={backend}").apply(setup_of(module)).module(torch.rand(64) + 1)
        (gradient,) = torch.autograd.grad(out.sum(), module.parameters())

        dropped = out == 1  # exp(0)
        assert 10 < int(dropped.sum()) < 54
        assert torch.equal(gradient == 0, dropped)


def test_attention_that_runs_again_drops_what_it_dropped() -> None:
    class Attends(nn.Module):
        """Attention of which the values are unit vectors, so that it returns its weights as they were dropped."""

        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.eye(16))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, self.values.sin().asin()[None], dropout_p=0.5)

    for budget in (1, 0):
        module = Attends()
        out = compiled(module, f"compile:{budget}").module(torch.randn(1, 16, 8))
        (gradient,) = torch.autograd.grad(out.cumsum(1).sum(), module.parameters())

        assert 64 < int((out == 0).sum()) < 192
        weight = torch.arange(16.0, 0, -1)[:, None].expand(16, 16)
        torch.testing.assert_close(gradient, out[0].T @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inductor_obeys_the_budget() -> None:
    x, exact = torch.randn(8, 32), nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    wanted, kept = gradients(setup_of(exact), x), [read(setup_of(exact), x).activation_bytes]

    for budget in (1, 0):
        setup = schemes.build(f"compile:{budget},backend=inductor").apply(setup_of(copy.deepcopy(exact)))
        for one, other in zip(gradients(setup, x), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        kept.append(read(setup, x).activation_bytes)

    uncompiled, all_of_it, inputs_alone = kept
    assert uncompiled >= all_of_it > inputs_alone


@pytest.mark.slow
def test_parts_of_a_model_are_compiled_alone() -> None:
    exact, x = transformer(), torch.randn(2, 8, 32)
    setup = compiled(copy.deepcopy(exact), "compile:0,only=0/2")

    for one, other in zip(gradients(setup, x), gradients(setup_of(exact), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [forward_of(setup.module[place]).graphs for place in (0, 2)] == [1, 1]  # type: ignore[index, arg-type]
    assert CompiledForward.of(setup.module) is None
