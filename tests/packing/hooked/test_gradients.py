"""Gradients of a hooked model: near the exact ones at 8 bits, unbiased at 2, however the step is made."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.methods.gact.sensitivity import Probing
from actbench.packing.hooked import HookedForward


class Block(nn.Module):
    """Attention, convolution, norms and a branch that may be left out."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.conv, self.batch, self.extra = nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.branch = True

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 4, 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.branch:
            x = x + F.gelu(self.extra(x))
        return x + self.batch(F.relu(self.conv(x.transpose(1, 2)))).transpose(1, 2)


def batch(seed=0):
    return torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(seed))


def pair(hook, **settings):
    exact = Block()
    return exact, hook(copy.deepcopy(exact), **settings)


@pytest.mark.parametrize("settings", [{}, {"group_size": 32}, {"stochastic": False}, {"probing": Probing(8, 1)}])
def test_gradients_at_8_bits_are_near_the_exact_ones(hook, step, near, settings):
    exact, model = pair(hook, **settings)

    assert near(step(model, batch()), step(exact, batch()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(hook, step, near, dtype):
    exact, model = pair(hook)

    assert near(step(model.to(dtype), batch().to(dtype)), step(exact.to(dtype), batch().to(dtype)), within=0.05)


def test_gradients_at_2_bits_are_unbiased(hook):
    """What enters a product as it is: a nonlinear derivative of a noisy number would be biased."""
    exact = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1, bias=False))
    x, runs = torch.randn(32, 64), 150

    def gradient(model):
        return torch.autograd.grad(model(x).sum(), model[2].weight)[0][0]

    expected = gradient(exact)
    deviations = {}
    for stochastic in (True, False):
        model = hook(copy.deepcopy(exact), bits=2, stochastic=stochastic)
        found = torch.stack([gradient(model) for _ in range(runs)]).double()
        deviations[stochastic] = (found.mean(0) - expected) / expected.norm()
        if stochastic:
            z = (found.mean(0) - expected) / (found.std(0) / runs**0.5)

    assert z.square().mean() < 1 + 4 * (2 / 64) ** 0.5  # 64 numbers of mean square 1: each has noise of its own
    assert z.abs().max() < 4.5
    assert deviations[False].norm() > 5 * deviations[True].norm()  # biased, while noise shrinks with the runs


def test_a_graph_that_changes_from_step_to_step(hook, step, near):
    exact, model = pair(hook, probing=Probing(8, 3))
    for number in range(6):
        exact.branch = model.branch = number % 2 == 0

        assert near(step(model, batch(number)), step(exact, batch(number)))


def test_gradients_accumulate_over_steps_with_other_bits(hook, near):
    exact, model = pair(hook, probing=Probing(8, 1))
    found = []
    for each in (exact, model):
        for number in range(3):
            each(batch(number)).square().mean().backward()
        found.append([p.grad for p in each.parameters()])

    assert near(*reversed(found))


def test_a_retained_graph_gives_the_same_gradient_each_time(hook):
    _, model = pair(hook, bits=2)
    loss = model(batch()).square().mean()
    first, second, third = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=again, allow_unused=True)
        for again in (True, True, False)
    )

    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_forwards_before_one_backward(hook, near):
    exact, model = pair(hook, probing=Probing(8, 2))
    found = []
    for each in (exact, model):
        losses = [each(batch(number)).square().mean() for number in range(4)]
        found.append(torch.autograd.grad(sum(losses), list(each.parameters())))

    assert near(*reversed(found))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_batches_of_other_sizes_find_their_bits_again(hook, width):
    _, model = pair(hook)
    model(batch())
    sites = list(HookedForward.of(model).hooks.sites)
    for site in sites:
        site.bits = width
    model(batch()[:3]).sum().backward()

    assert list(HookedForward.of(model).hooks.sites) == sites


def test_a_second_derivative_is_refused_where_something_is_packed(hook):
    x = torch.randn(32, 64, requires_grad=True)
    linear, deep = hook(nn.Linear(64, 64)), hook(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    (first,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)  # output and input are left whole
    (second,) = torch.autograd.grad(first.sum(), linear.weight)

    assert second.norm() > 0
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(deep(x).square().sum(), x, create_graph=True)
