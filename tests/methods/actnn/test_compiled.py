"""Layers that pack their input in graphs of torch.compile: mean gradients, what is saved, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.scheme.setup import TrainingSetup

DRAWS = 40
MOST_ERRORS = 4.5


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chain() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64),
        nn.Tanh(), nn.Linear(64, 8),
    )  # fmt: skip
    return model, torch.randn(64, 24)


def convolutions() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.LeakyReLU(inplace=True), nn.AvgPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 8),
    )  # fmt: skip
    return model, torch.randn(16, 3, 16, 16)


def attention() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(24, 32), layer, nn.Linear(32, 8)), torch.randn(4, 16, 24)


def converted(exact: nn.Module, spec: str = "actnn:L2") -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module


def gradients(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), [*model.parameters(), x]))


@pytest.mark.parametrize("make", [chain, convolutions, attention])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_mean_gradient_is_the_exact_one(make: Any, backend: str) -> None:
    exact, x = make()
    x.requires_grad_()
    model = converted(exact)
    run = torch.compile(model, backend=backend, fullgraph=True)
    wanted = gradients(exact, exact, x)
    draws = [gradients(run, model, x) for _ in range(DRAWS)]

    for name, truth, *found in zip([*dict(model.named_parameters()), "input"], wanted, *draws, strict=True):
        shares = torch.stack([(each * truth).sum() / truth.square().sum() for each in found])
        error = float(shares.std() / DRAWS**0.5)
        assert error < 0.02, name
        assert abs(float(shares.mean()) - 1) < MOST_ERRORS * error + 1e-3, name  # norms have a small bias
    assert any(float((a - b).abs().max()) > 0 for a, b in zip(draws[0], draws[1], strict=True))


@pytest.mark.parametrize("make", [chain, convolutions])
def test_the_forward_pass_and_the_statistics_of_norms_are_exact(make: Any) -> None:
    exact, x = make()
    model = converted(exact)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)

    for _ in range(2):
        torch.testing.assert_close(run(x), exact(x), rtol=1e-5, atol=1e-6)
    for name, buffer in exact.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)


def saved(run: Any, x: Tensor) -> tuple[int, int]:
    """Return the bytes of codes, and of floats that are larger than a weight, which wait for the backward pass."""
    sizes: dict[int, tuple[torch.dtype, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.dtype, tensor.nbytes
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    codes = sum(size for dtype, size in sizes.values() if dtype == torch.uint8)
    return codes, sum(size for dtype, size in sizes.values() if dtype == torch.float32 and size >= 2**16)


def test_a_graph_saves_codes_and_not_the_inputs() -> None:
    exact = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(512, 64)
    whole = saved(torch.compile(exact, backend="aot_eager", fullgraph=True), x)
    packed = saved(torch.compile(converted(exact), backend="aot_eager", fullgraph=True), x)

    assert whole == (0, 4 * x.nbytes)
    assert packed == (4 * x.numel() // 2, 0)  # 4 bits an element


def test_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    model, graphs = converted(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for block in model:
        block.compile(backend=backend, fullgraph=True)
    model(torch.randn(8, 16)).sum().backward()

    assert len(graphs) == 2  # the input of the first needs no gradient
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("spec", "make", "why"),
    [
        ("actnn:L3", chain, "bits follow from what the layers note in a step"),
        ("actnn:L2,per_sample=true", chain, "bits follow from what the layers note in a step"),
        ("actnn:L2,swap=true", chain, "copies run beside the computation"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(spec: str, make: Any, why: str) -> None:
    exact, x = make()
    run = torch.compile(converted(exact, spec), backend="eager")

    with pytest.raises(ConversionError, match=f"cannot be compiled: .*{why}"):
        run(x)
