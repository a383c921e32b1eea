"""Models packed by hooks as regions of graphs of torch.compile: mean gradients, what is saved, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compilednets import Block
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.scheme.setup import TrainingSetup

DRAWS = 40
MOST_ERRORS = 4.5
"""Standard errors that two means may differ by."""


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chain() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64),
        nn.Tanh(), nn.Linear(64, 8),
    )  # fmt: skip
    return model, torch.randn(64, 24)


def convolutions() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.LeakyReLU(inplace=True), nn.Flatten(),
        nn.Linear(512, 8), nn.LogSoftmax(1),
    )  # fmt: skip
    return model, torch.randn(16, 3, 16, 16)


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(32), Block(32), nn.Linear(32, 8)), torch.randn(4, 8, 32)


def converted(exact: nn.Module, spec: str) -> nn.Module:
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module


def gradients(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), [*model.parameters(), x]))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sampled(slow=2))])
@pytest.mark.parametrize("make", [chain, convolutions, transformer])
@pytest.mark.parametrize("spec", ["gact:L1,bits=2", "smaq,on=activations", "coat"])
def test_the_mean_gradient_is_that_of_the_uncompiled_model(spec: str, make: Any, backend: str) -> None:
    exact, x = make()
    x.requires_grad_()
    model = converted(exact, spec)
    run = torch.compile(model, backend=backend, fullgraph=True)
    wanted = gradients(exact, exact, x)
    draws = [[gradients(each, model, x) for _ in range(DRAWS)] for each in (model, run)]
    rounding = 1e-5 * max(float(each.abs().max()) for each in wanted)  # some biases have a gradient of 0 but for it
    distances = torch.zeros(2)

    for place, (name, truth) in enumerate(zip([*dict(model.named_parameters()), "input"], wanted, strict=True)):
        eager, compiled = ([draw[place] for draw in each] for each in draws)
        distances += torch.tensor([float((found[0] - truth).square().sum()) for found in (eager, compiled)])
        if float(truth.abs().max()) < 10 * rounding:
            continue
        shares = [
            torch.stack([(each * truth).sum() / truth.square().sum() for each in found]) for found in (eager, compiled)
        ]
        error = float(sum(each.var() for each in shares) / DRAWS) ** 0.5
        assert error < 0.05, name
        assert abs(float(shares[0].mean() - shares[1].mean())) < MOST_ERRORS * error + 1e-4, name
    assert 0.5 < float(distances[1] / distances[0]) < 2  # it is packed as without a compiler


def test_the_forward_pass_and_the_statistics_of_norms_are_exact() -> None:
    exact, x = convolutions()
    model = converted(exact, "gact:L1")
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


def test_a_graph_saves_codes_once_for_all_that_save_a_tensor_and_the_batch_whole() -> None:
    parts = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())]
    x = torch.randn(512, 64)
    run = torch.compile(converted(nn.Sequential(*parts), "gact:L1,bits=4"), backend="aot_eager", fullgraph=True)

    # the results of tanh, which the linear layer after it saves too
    assert saved(run, x) == (3 * x.numel() // 2, x.nbytes)


def test_a_model_that_is_no_region_runs_uncompiled() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            torch._dynamo.graph_break()
            found: Tensor = self.second(hidden)
            return found

    model, x = converted(Breaking(), "coat"), torch.randn(64, 24, requires_grad=True)
    run = torch.compile(model, backend="aot_eager")

    for compiled, same in zip(gradients(run, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(compiled, same)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("gact:L2", "follow from passes that probe it"),
        ("gact:L1,swap=true", "does not trace the hooks that move them"),
        ("gact:L1,widths=linear:4", "does not tell which of them saves a tensor"),
        ("encode:int:6,on=activations", "does not trace the hooks"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(spec: str, why: str) -> None:
    exact, x = chain()
    run = torch.compile(converted(exact, spec), backend="eager")

    with pytest.raises(ConversionError, match=f"cannot be compiled: .*{why}"):
        run(x)


def test_blocks_of_a_model_that_runs_under_hooks_are_refused() -> None:
    exact, x = chain()
    model = converted(exact, "coat")
    for block in model:
        block.compile(backend="aot_eager")

    with pytest.raises(ConversionError, match="compile the whole model"):
        model(x)
