"""Updates of optimizers with less state than Adam, by the papers' formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench import optim
from actbench.methods.optimizers.adammini import Blocks

BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 0.1, 0.5


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Moments:
    """Adam's direction by its formula, in float64."""

    def __init__(self) -> None:
        self.first, self.second, self.steps = torch.zeros(()), torch.zeros(()), 0

    def direction(self, gradient: Tensor, mean: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * mean(gradient**2)
        first, second = self.first / (1 - BETAS[0] ** self.steps), self.second / (1 - BETAS[1] ** self.steps)
        return first / (second**0.5 + EPS)


def limited(update: Tensor, before: list[float]) -> Tensor:
    """Limit the growth of the norm to a hundredth (Fira's algorithm)."""
    norm = float(update.norm())
    if before and norm / before[-1] > 1.01:
        update = update / norm * before[-1] * 1.01
    before.append(float(update.norm()))
    return update


def reference(name: str, gradients: list[Tensor], weight: Tensor) -> Tensor:
    """Return the weight after steps with these gradients; rank 3, a new projection every second step, scale 0.25."""
    moments, norms, projection = Moments(), list[float](), torch.zeros(())
    wide = weight.shape[0] <= weight.shape[1]
    for step, gradient in enumerate(gradients):
        turned = gradient if wide else gradient.t()  # the shorter side first
        if step % 2 == 0:
            if name == "apollo":
                random = torch.Generator().manual_seed(step // 2)
                projection = torch.randn(len(turned), 3, generator=random, dtype=torch.float64) / 3**0.5
            else:
                left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)  # signs are not determined
                projection = (left[:, :3] if wide else right[:3].t()).double()
        low = projection.t() @ turned
        found = moments.direction(low)
        factors = found.norm(dim=0) / low.norm(dim=0)
        if name == "galore":
            update = 0.25 * projection @ found
        elif name == "fira":
            update = 0.25 * (projection @ found + limited((turned - projection @ low) * factors, norms))
        else:
            update = 0.25 * limited(turned * factors, norms)
        weight = weight * (1 - LR * DECAY) - LR * (update if wide else update.t())
    return weight


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
@pytest.mark.parametrize("kind", [optim.GaLore, optim.Fira, optim.Apollo])
def test_updates_of_matrices_are_those_of_the_paper(kind: Any, shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    gradients = [torch.randn(shape, dtype=torch.float64) * scale for scale in (1, 3, 0.2, 1, 5)]
    expected = reference(kind.__name__.lower(), gradients, weight.detach().clone())
    optimizer = kind([weight], [weight], rank=3, gap=2, scale=0.25, lr=LR, weight_decay=DECAY)

    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-6)  # vectors are found in float32


def test_one_factor_for_a_matrix_is_the_ratio_of_the_norms() -> None:
    weight, gradient = nn.Parameter(torch.zeros(8, 12)), torch.randn(8, 12)
    optimizer = optim.Apollo([weight], [weight], rank=1, scale=1.0, scaling="tensor", lr=1.0)

    weight.grad = gradient.clone()
    optimizer.step()

    low = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).t() @ gradient
    factor = (low / (low.abs() + EPS)).norm() / low.norm()  # Adam's first step is the sign
    torch.testing.assert_close(weight.detach(), -gradient * factor)


def test_the_norm_of_an_update_grows_by_a_hundredth_at_most() -> None:
    weight, norms = nn.Parameter(torch.zeros(8, 12)), []
    optimizer = optim.Apollo([weight], [weight], rank=3, scale=1.0, lr=1.0)
    for size in (1.0, 1.0, 1e4, 1e4, 1e-6, 0.0, 1.0):
        before = weight.detach().clone()
        weight.grad = torch.randn(8, 12) * size
        optimizer.step()
        if size:  # a step without a gradient is no limit
            norms.append(float((weight.detach() - before).norm()))

    assert all(later <= 1.011 * earlier + 1e-5 for earlier, later in itertools.pairwise(norms))
    assert bool(weight.isfinite().all())


@pytest.mark.parametrize(
    ("kind", "options"),
    [(optim.Apollo, {"rank": 64}), (optim.Apollo, {"rank": 1, "scaling": "tensor"}), (optim.Fira, {"rank": 64})],
    ids=["channels", "tensor", "fira"],
)
def test_what_has_no_gradient_now_but_had_one_gets_finite_updates(kind: Any, options: dict[str, Any]) -> None:
    weight, gradient = nn.Parameter(torch.zeros(80, 96)), torch.randn(80, 96)
    optimizer = kind([weight], [weight], lr=1e-3, **options)
    for _ in range(5):
        weight.grad = gradient
        optimizer.step()
    before = weight.detach().clone()

    weight.grad = torch.zeros(80, 96) if "scaling" in options else gradient.index_fill(1, torch.tensor(3), 0)
    optimizer.step()
    moved = (weight.detach() - before).norm(dim=0)

    assert bool(weight.isfinite().all())
    if kind is optim.Apollo:  # Fira's low part moves on by its moments
        assert moved[3] == 0
    assert bool((moved[4:] > 0).all()) != ("scaling" in options)


@pytest.mark.parametrize("kind", [optim.Apollo, optim.Fira])
def test_a_first_gradient_of_zero_limits_no_later_step(kind: Any) -> None:
    weight = nn.Parameter(torch.zeros(16, 32))
    before = weight.detach().clone()
    optimizer = kind([weight], [weight], rank=4, gap=1, scale=1.0, lr=1.0)
    for size in (0.0, 0.0, 1.0, 1.0):
        before.copy_(weight.detach())
        weight.grad = torch.randn(16, 32) * size
        optimizer.step()

    moved = weight.detach() - before
    assert int(torch.linalg.matrix_rank(moved)) == 16  # not only within a projection
    assert float(moved.norm()) > 1


@pytest.mark.parametrize(
    ("blocks", "mean"),
    [
        (Blocks((8, 12), 1), lambda x: x.mean(1, keepdim=True)),
        (Blocks((8, 12), 0), lambda x: x.mean(0, keepdim=True)),
        (Blocks((2, 48), 1), lambda x: x.view(2, 48).mean(1).repeat_interleave(4)[:, None]),
        (Blocks((1, 96), 1), lambda x: x.mean()),
    ],
    ids=["outputs", "columns", "heads", "whole"],
)
def test_updates_with_a_moment_for_each_block_are_those_of_the_paper(blocks: Blocks, mean: Any) -> None:
    weight = nn.Parameter(torch.randn(8, 12, dtype=torch.float64))
    expected, moments = weight.detach().clone(), Moments()
    optimizer = optim.AdamMini([weight], {weight: blocks}, lr=LR, weight_decay=DECAY)

    for _ in range(4):
        weight.grad = torch.randn(8, 12, dtype=torch.float64)
        expected = expected * (1 - LR * DECAY) - LR * moments.direction(weight.grad, mean)
        optimizer.step()

    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("decoupled", [True, False])
def test_other_parameters_are_stepped_as_torch_does(decoupled: bool) -> None:
    one, other = (nn.Parameter(torch.ones(5)) for _ in range(2))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    exact = kind([one], lr=LR, weight_decay=DECAY)
    found = optim.GaLore([other], [], rank=3, lr=LR, weight_decay=DECAY, decoupled=decoupled)

    for _ in range(4):
        one.grad = torch.randn(5)
        other.grad = one.grad.clone()
        exact.step()
        found.step()

    torch.testing.assert_close(one, other)


def test_muon_s_first_step_is_torch_s_and_later_ones_are_near() -> None:
    one, other = (nn.Parameter(torch.ones(64, 96)) for _ in range(2))
    exact = torch.optim.Muon([one], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    found = optim.Muon8bit([other], [other], lr=LR, weight_decay=DECAY)

    for step in range(6):
        before = one.detach().clone()
        one.grad = torch.randn(64, 96)
        other.grad = one.grad.clone()
        exact.step()
        found.step()
        if step == 0:
            assert torch.equal(one, other)

    assert float((one - other).detach().norm() / (one.detach() - before).norm()) < 0.1
    assert set(found.state[other]) == {"step", "codes", "bounds"}
