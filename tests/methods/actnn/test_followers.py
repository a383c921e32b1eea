"""Bits of a tensor that a norm keeps and another layer reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.methods.actnn.bitallocation import BitAllocation
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.methods.actnn.solver import least_variance
from actbench.packing.sitestate import SiteState
from actbench.scheme.setup import TrainingSetup


def seen(site, ranges, gradients, elements=100):
    site.begin(torch.empty(elements))
    site.ranges, site.gradients = torch.tensor(float(ranges)), torch.tensor(float(gradients))


def shared(site, owner, gradients):
    site.begin(torch.empty(100))
    site.share(owner)
    site.ranges, site.gradients = None, torch.tensor(float(gradients))


def test_the_tensor_of_a_norm_costs_what_its_other_readers_lose():
    leader, reader, other = (SiteState(str(index), 0) for index in range(3))
    norm = SiteState("norm", 0)
    leader.followers.append(norm)
    shares = BitAllocation([leader, reader, other], 3, 10)
    shares.begin()
    assert norm.watched
    seen(leader, 1, 4)
    seen(norm, 9, 0)
    shared(reader, norm, 100)
    shared(other, norm, 300)
    shares.begin()
    expected = least_variance([0.25 * 1 * 4, 0.25 * 9 * (100 + 300)], [100, 100], 3 * 200)

    assert [leader.bits, norm.bits] == expected
    assert leader.bits < norm.bits
    assert not norm.watched


def test_a_norm_whose_tensor_nobody_else_reads_goes_with_the_layer_before_it():
    leader, other, norm = SiteState("leader", 0), SiteState("other", 0), SiteState("norm", 0)
    leader.followers.append(norm)
    shares = BitAllocation([leader, other], 3, 1)
    for step in range(2):
        shares.begin()
        seen(leader, 1, 4)
        seen(norm, 9, 5)
        if step == 0:
            shared(other, norm, 400)
        else:
            seen(other, 9, 400)
        shares.begin()
        if step == 0:
            assert norm.bits > leader.bits
    expected = least_variance([0.25 * 4, 0.25 * 9 * 400], [200, 100], 3 * 300)

    assert [leader.bits, other.bits] == expected
    assert norm.bits == leader.bits


class Branches(nn.Module):
    """A norm keeps the tensor that matters, and a linear layer reads it too; another branch hardly matters."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.loud = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.quiet = nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        return (self.norm(x) + 1000 * self.loud(x) + 1e-3 * self.quiet(x * 2)).square().mean()


@pytest.mark.filterwarnings("ignore:gradients of single samples are not used")  # nobody names samples here
@pytest.mark.parametrize("keys", ["", ",per_sample=false", ",use_gradient=true,group_size=32"])
def test_a_model_gives_bits_to_what_matters(keys):
    torch.manual_seed(0)
    model = schemes.build(f"actnn:L3,bits=3,adapt_interval=1{keys}").apply(TrainingSetup(Branches())).module
    x = torch.randn(256, 64)
    for _ in range(3):
        model(x).backward()
    bits = {path: site.bits for path, site in CompressedForward.of(model)._sites().items()}

    assert model.loud.site.owner is model.norm.site
    assert bits["norm"] > 4
    assert bits["quiet"] < 2
