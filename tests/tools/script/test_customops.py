"""Custom operators on a simulated card: their real forms allocate what they would allocate on a card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import actbench
from actbench.tools.script.libraries import compiled
from actbench.units import MIB

CARD = "rtx-4090"
NUMBERS = 4 * MIB // 4


@torch.library.custom_op("actbench_test::scaled", mutates_args=())
def scaled(x: Tensor, scale: float) -> Tensor:
    """Hold a copy while the result is made."""
    copy = x * 2
    return copy * x.new_tensor(scale)


@scaled.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("actbench_test::compiled_inside", mutates_args=())
def compiled_inside(x: Tensor, scale: float) -> Tensor:
    """Compile what it computes, where it computes it."""

    @torch.compile
    def run(x: Tensor) -> Tensor:
        factor = x.new_tensor(scale, dtype=torch.float32)
        return torch.mm((x * factor).t().contiguous().sin(), x)

    return run(x)


@compiled_inside.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[1])


@torch.library.custom_op("actbench_test::addressed", mutates_args=())
def addressed(x: Tensor) -> Tensor:
    """Stand for a library that launches kernels."""
    raise RuntimeError("CUDA driver version is insufficient")


@addressed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def peak_of(run: Callable[[], object]) -> int:
    with torch.no_grad():
        run()  # what is compiled is cached
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - held


def test_what_a_custom_operator_holds_inside_is_counted() -> None:
    with actbench.simulate(CARD):
        x = torch.zeros(NUMBERS, device="cuda")
        assert peak_of(lambda: scaled(x, 0.5)) == 2 * x.nbytes + 512  # the scale, which has a block of its own


def test_a_gradient_of_a_custom_operator_is_counted_too() -> None:
    scaled.register_autograd(lambda ctx, gradient: (scaled(gradient, 0.5), None))
    with actbench.simulate(CARD):
        x = torch.zeros(NUMBERS, device="cuda", requires_grad=True)
        y = scaled(x, 0.5)
        held = torch.cuda.memory_allocated()
        y.backward(x.detach())
        assert torch.cuda.max_memory_allocated() - held >= 2 * x.nbytes
        assert x.grad is not None


@pytest.mark.skipif(not compiled.is_possible(), reason="compiles with torch 2.15 or newer, and Triton")
@pytest.mark.parametrize("is_outside_too", [False, True])
def test_a_custom_operator_may_compile(
    is_outside_too: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "custom"))
    with actbench.simulate("h100-80gb"):
        x = torch.zeros(1024, 1024, device="cuda")

        def run() -> Tensor:
            return compiled_inside(x, 0.5)

        way = torch.compile(run) if is_outside_too else run
        found = peak_of(way)
    assert found == 2 * x.nbytes + 32 * MIB  # the transposed copy, the result and cuBLAS's workspace


def test_one_that_needs_memory_is_named_and_its_results_are_counted() -> None:
    with actbench.simulate(CARD) as card:
        x = torch.zeros(NUMBERS, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([x])
        while True:
            held = torch.cuda.memory_allocated()
            y = addressed(x.detach())
            assert torch.cuda.memory_allocated() - held == x.nbytes
            (x * y).sum().backward()
            del y
            optimizer.step()
            optimizer.zero_grad()
    assert sum("addressed cannot run without memory" in note for note in card.measurement.warnings) == 1
