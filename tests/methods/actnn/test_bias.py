"""What few bits do to the gradient on average: nothing, but for what multiplies two decoded values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.methods.actnn.bitallocation import variance
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.ops.noise import diverge
from actbench.packing import SavedTensors, SiteState
from actbench.scheme.setup import TrainingSetup

DRAWS = 200
FAR = 4.5
"""Standard errors that no mean of a right estimate is off by: of the 200 here one is so by chance in 700 runs."""


def network() -> TrainingSetup:
    """Return convolutions without norms: all gradients are linear in what is kept."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 4),
    )  # fmt: skip
    return TrainingSetup(net, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))


def gradients(setup: TrainingSetup, draw: int) -> list[Tensor]:
    """Return all gradients of one draw of the rounding noise; batch and dropout masks are always the same."""
    batch = {"x": torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1)), "labels": torch.arange(32) % 4}
    torch.manual_seed(0)
    diverge(torch.default_generator, draw)
    setup.module.zero_grad()
    setup.forward(batch).backward()  # type: ignore[no-untyped-call]
    return [p.grad.flatten().double() for p in setup.module.parameters() if p.grad is not None]


LONG = pytest.mark.sampled(slow=1)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("actnn:L2", marks=LONG),
        pytest.param("actnn:L3,bits=2,group_size=64", marks=LONG),
        pytest.param("gact:L1.2", marks=LONG),
        pytest.param("gact:L2.1", marks=LONG),
    ],
)
def test_the_mean_over_many_draws_is_the_exact_gradient(spec: str) -> None:
    exact = gradients(network(), 0)
    setup = schemes.build(spec).apply(network())
    for draw in range(3):
        gradients(setup, draw)  # until the bits are shared out
    found = [torch.stack(each) for each in zip(*(gradients(setup, draw) for draw in range(DRAWS)), strict=True)]
    noisy = 0

    for draws, right in zip(found, exact, strict=True):
        error = draws - right
        if not error.std(0).max() > 1e-6 * right.norm():  # a bias, or the layer that reads the batch itself
            torch.testing.assert_close(draws[0], right, rtol=1e-4, atol=1e-6)
            continue
        noisy += 1
        signs = 2.0 * torch.randint(0, 2, (len(right), 20), generator=torch.Generator().manual_seed(2)) - 1
        sums = error @ signs.double()
        far = sums.mean(0) / (sums.std(0) / DRAWS**0.5)
        assert far.abs().max() < FAR
    assert noisy >= 3


def test_to_the_nearest_code_the_gradient_is_biased() -> None:
    """By more than what 200 draws would leave of a bias: the test above could fail."""
    exact = torch.cat(gradients(network(), 0))
    random, nearest = (schemes.build(f"actnn:L2,bits=2,stochastic={how}").apply(network()) for how in ("true", "false"))
    draws = torch.stack([torch.cat(gradients(random, draw)) for draw in range(30)])
    far = torch.cat(gradients(nearest, 0)) - exact

    assert far.square().sum() > 20 * draws.var(0).sum() / DRAWS


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(32, 16, bias=False), (64, 32)),
        pytest.param(nn.Conv2d(8, 8, 3, padding=1, bias=False), (16, 8, 4, 4), marks=LONG),
        pytest.param(nn.Conv2d(8, 4, 3, stride=2, padding=2, bias=False), (16, 8, 5, 5), marks=LONG),
    ],
)
def test_the_variance_is_below_the_closed_form_and_near_it(layer: nn.Module, shape: tuple[int, ...], bits: int) -> None:
    """It takes each element halfway between two codes, a quarter of a step squared; anywhere there it is a sixth."""
    torch.manual_seed(0)
    place = SiteState("", bits, watched=True, factor=layer.weight[0].numel() / 4)  # type: ignore[index, union-attr, operator]
    few = compressed(layer, SavedTensors(GroupQuantization(32)), place)
    assert few is not None
    x = torch.randn(shape)
    dy = torch.randn(layer(x).shape)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(few(x), few.weight, dy)
        return found.double()

    found = torch.stack([gradient() for _ in range(DRAWS)])
    most = float(variance(place)) * 32 / (2**bits - 1) ** 2  # type: ignore[arg-type]

    assert 0.4 * most < float(found.var(0).sum()) < most


@LONG
def test_a_batch_norm_multiplies_two_decoded_values_and_is_biased_by_the_share_of_one_element() -> None:
    """Its input's gradient has ``x * mean(dy * x)`` in it: off by ``dy * Var(x) / M`` where M elements are a channel's.

    Here M is 36; in a network it is thousands, and the bias a ten-thousandth of the gradient.
    """
    torch.manual_seed(0)
    exact = nn.BatchNorm2d(2)
    few = compressed(copy.deepcopy(exact), packer := SavedTensors(GroupQuantization(32)), place := SiteState("", 2))
    assert few is not None
    x, dy = torch.randn(4, 2, 3, 3, requires_grad=True), torch.randn(4, 2, 3, 3)
    (right,) = torch.autograd.grad(exact(x), x, dy)
    found = torch.stack([torch.autograd.grad(few(x), x, dy)[0] for _ in range(3000)])
    decoded = torch.stack([keep.unpack() for keep in (packer.pack(x + 0, place) for _ in range(3000))])
    invstd = (x.var((0, 2, 3), unbiased=False, keepdim=True) + exact.eps).rsqrt()
    expected = -invstd * dy * (invstd**2 * decoded.var(0)) / 36
    bias, expected = found.mean(0) - right, expected.detach()

    assert float((bias * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.2)
    assert expected.norm() < 0.03 * right.norm()
