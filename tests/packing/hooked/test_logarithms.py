"""Scores of minus infinity, and what log-softmax and the losses around it save."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.methods.actnn.ops import groupquant
from actbench.methods.gact.sensitivity import Probing
from actbench.packing.codecs import Logarithms
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.forward import StaysHere
from actbench.packing.hooked.hooks import PackedAtSite

ROWS, CLASSES = 32, 80
MASKED = torch.arange(CLASSES) % 5 == 0
LABELS = torch.arange(ROWS) * 5 % CLASSES + 1


class Scored(nn.Module):
    """A loss of scores, some of which are minus infinity."""

    def __init__(self, loss):
        super().__init__()
        self.first, self.loss = nn.Linear(64, CLASSES), loss

    def forward(self, x):
        return self.loss(self.first(x).masked_fill(MASKED, -torch.inf), LABELS[: len(x)])


def batch():
    return torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(4))


def gradient(model):
    model.zero_grad()
    model(batch()).backward()
    return model.first.weight.grad


LOSSES = {
    "cross entropy": lambda scores, y: F.cross_entropy(scores, y),
    "of smoothed labels": lambda scores, y: F.cross_entropy(scores[:, ~MASKED], y % 64, label_smoothing=0.1),
    "with weights": lambda scores, y: F.cross_entropy(scores, y, torch.linspace(0.5, 2, CLASSES)),
    "of a picture": lambda scores, y: F.cross_entropy(scores.t()[None, :, None], y[None, None]),
    "in two steps": lambda scores, y: F.nll_loss(torch.log_softmax(scores, 1), y),
    "of a method": lambda scores, y: F.nll_loss(input=scores.log_softmax(1), target=y),
    "of a layer": lambda scores, y: nn.NLLLoss()(nn.LogSoftmax(1)(scores), y),
    "of a soft target": lambda scores, y: F.cross_entropy(scores[:, ~MASKED], torch.full((len(y), 64), 1 / 64)),
    "of places": lambda scores, y: F.log_softmax(scores, 1).gather(1, y[:, None]).mean(),
    "sums of powers": lambda scores, y: scores.logsumexp(1).mean(),
}


@pytest.mark.parametrize("probing", [None, Probing(8, 1)])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_masked_score_leaves_all_gradients_what_they_are(hook, near, kind, probing):
    exact = Scored(LOSSES[kind])
    model = hook(copy.deepcopy(exact), probing=probing)

    assert near([gradient(model)], [gradient(exact)])


@pytest.mark.parametrize("kind", ["cross entropy", "in two steps"])
def test_of_a_likelihood_the_probabilities_are_packed_and_nothing_else_is_kept(hook, packed, kind):
    model = hook(Scored(LOSSES[kind]), bits=4)
    found = packed(model)
    model(batch())
    whole = [held for shape, held in found if shape == (ROWS, CLASSES) and isinstance(held, StaysHere)]
    (held,) = [
        held for _, held in found if isinstance(held, PackedAtSite) and isinstance(held.packed.codec, Logarithms)
    ]

    assert sum(part.nbytes for part in held.packed.parts) == groupquant.packed_bytes(ROWS * CLASSES, 4, 256)
    assert [one.tensor.untyped_storage().nbytes() for one in whole] == [4]  # the scores' shape alone


def test_the_gradient_of_a_likelihood_is_unbiased_at_two_bits(hook):
    """Logarithms in few bits would be off by a factor whose mean is not 1: these are, by 30 standard errors."""
    exact = nn.Linear(64, CLASSES)
    scores = 3 * exact(batch()).detach()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(ROWS, CLASSES))

        def forward(self, x):
            return F.cross_entropy(x + self.shift, LABELS, reduction="sum")

    def found(model):
        return torch.autograd.grad(model(scores), model.shift)[0].double()

    right, model = found(Loss()), hook(Loss(), bits=2)
    draws = torch.stack([found(model) for _ in range(200)])
    weights = torch.softmax(scores, 1).double()  # where an error of logarithms would add up
    sums = ((draws - right) * weights).sum((1, 2))

    assert sums.abs().max() > 0
    assert abs(sums.mean() / (sums.std() / 200**0.5)) < 4.5


def test_a_tensor_that_is_not_finite_is_kept_whole_and_its_neighbours_are_packed(hook, packed):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, CLASSES)

        def forward(self, x):
            x = self.first(x)
            return x.masked_fill(MASKED, -torch.inf).logsumexp(1).sum() + (x * x).sum()

    model = hook(Two(), bits=4)
    found = packed(model)
    model(batch()).backward()
    (held, packs) = found.of(ROWS, CLASSES)[:2]

    assert isinstance(held, StaysHere)
    assert isinstance(packs, PackedAtSite)
    assert torch.isfinite(model.first.weight.grad).all()
    finite = [site for site in HookedForward.of(model).hooks.sites if site.elements]
    assert [site.path for site in finite] == [f"AddmmBackward0 [{CLASSES}] #0"]  # the others are no one's bits


def test_the_loss_over_paths_goes_with_its_sums(hook, near):
    """``F.ctc_loss`` saves sums over paths, most of them minus infinity, and takes powers of differences with them."""

    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 20)

        def forward(self, x):
            heard = F.log_softmax(self.first(x.view(16, 2, 64)), 2)
            return F.ctc_loss(heard, LABELS[:8].view(2, 4) % 19 + 1, [16, 16], [4, 4])

    exact = Speech()

    assert near([gradient(hook(copy.deepcopy(exact)))], [gradient(exact)])


def test_logarithms_come_back_as_they_were_seen(hook):
    inner = HookedForward.of(hook(nn.Linear(64, 64), bits=8)).hooks
    x = torch.log_softmax(torch.randn(8, 100), 1)
    powers, _ = inner.pack_at_site(x.exp())
    packed = powers._replace(codec=Logarithms(powers.codec))

    assert (packed.layout.shape, packed.layout.dtype, packed.bits) == (x.shape, x.dtype, 8)
    back = packed.rows(2, 4)
    torch.testing.assert_close(back.exp(), x[2:4].exp(), rtol=0, atol=0.01)
