"""Blocks that are recomputed in a model whose layers keep few bits and whose attention has hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from actbench import scheme as schemes
from actbench.methods.actnn.layers.modelforward import CompressedForward
from actbench.packing.hooked import HookedForward
from actbench.packing.samplegradients import samples
from actbench.scheme.setup import TrainingSetup

ROWS, LENGTH = 8, 32


class SomeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(64), SomeAttention(), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.out(self.attention(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def convert(model, spec):
    return schemes.build(spec).apply(TrainingSetup(model)).module


def batch():
    return torch.randn(ROWS, LENGTH, 64, generator=torch.Generator().manual_seed(1))


def gradients(model):
    model.zero_grad()
    y = model(batch())
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [parameter.grad for parameter in model.parameters()]


def spied(model):
    """Return a list to which the hooks of all attention modules add what they keep."""
    found = []
    for block in model.blocks:
        hooks = HookedForward.of(block.attention).hooks
        pack = hooks.pack

        def spy(tensor, pack=pack):
            held = pack(tensor)
            found.append((tuple(tensor.shape), held))
            return held

        hooks.pack = spy
    return found


def test_nothing_of_attention_is_kept_until_its_block_runs_again():
    model = convert(Model(), "actnn:L2+checkpoint,blocks=Block")
    found = spied(model)
    loss = model(batch()).sum()
    assert found == []
    loss.backward()

    packed = [shape for shape, held in found if hasattr(held, "packed")]
    assert packed.count((ROWS, LENGTH, LENGTH)) == 3 * 2  # each block's probabilities, of softmax and of the product


@pytest.mark.parametrize("spec", ["actnn:L2,bits=8", "actnn:L2,bits=8+checkpoint,blocks=Block"])
def test_gradients_are_near_the_exact_ones(spec):
    exact = Model()
    found = gradients(convert(copy.deepcopy(exact), spec))

    for one, other in zip(found, gradients(exact), strict=True):
        assert (one - other).norm() <= 0.03 * other.norm()


def test_bits_and_histories_are_those_of_the_step():
    model = convert(Model(), "actnn:L3,bits=3,use_gradient=true,group_size=32,adapt_interval=1+checkpoint,blocks=Block")
    for step in range(3):
        with samples(range(step, step + ROWS)):
            loss = model(batch() * torch.linspace(0.1, 10, ROWS)[:, None, None]).square().mean()
        with samples(range(100, 100 + ROWS)):  # of the next batch, which is loaded meanwhile
            loss.backward()
    sites = CompressedForward.of(model)._sites()

    assert len({site.bits for path, site in sites.items() if "blocks" in path}) > 1
    table = sites["blocks.1.out"].sample_gradients._table
    assert table[: ROWS + 2].isfinite().all()
    assert len(table) < 100
