"""What compilers make of sketched layers: one draw for each sketch, and no more bytes saved than uncompiled."""

from itertools import cycle

import pytest
import torch
from functorch.compile import aot_module, min_cut_rematerialization_partition, nop
from torch import nn
from torch._functorch import config as partitioning
from torch.utils.checkpoint import checkpoint

from actbench.methods.randomized.ops import sketch as sketching
from actbench.methods.randomized.ops.sketch import Sketching
from actbench.methods.randomized.sketched import sketched
from actbench.packing.savedtensors import SharingTable


class Residual(nn.Module):
    """A block of which an exact backward pass needs nothing but the inputs of its linear layers."""

    def __init__(self, make):
        super().__init__()
        self.one, self.other = make(), make()

    def forward(self, x):
        return x + self.other(self.one(x))


class Recomputed(Residual):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Attention(nn.Module):
    """Three layers that read one input, beside which a backward pass needs their outputs."""

    def __init__(self, table):
        super().__init__()
        self.q, self.k, self.v = (sketched(nn.Linear(8, 8), Sketching("rows_distinct", 0.25), table) for _ in "qkv")

    def forward(self, x):
        return self.q(x) * self.k(x) * self.v(x)


def model(block, act):
    table, kinds = SharingTable(), cycle(("rows_distinct", "wta", "gaussian"))

    def layer():
        return sketched(nn.Linear(8, 8), Sketching(next(kinds), 0.25), table)

    return nn.Sequential(layer(), act(), block(layer), act(), block(layer))


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def drawn(monkeypatch):
    """The seeds that are drawn."""
    found, draw = [], sketching.fresh_seed
    monkeypatch.setattr(sketching, "fresh_seed", lambda like: found.append(draw(like)) or found[-1])
    return found


def saved_bytes(run, x):
    """Run forward and backward; return the bytes of what waits between the two, parameters and x left out."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = run(x).square().sum()
    own = {tensor.untyped_storage() for tensor in [x, *run.parameters()]}
    loss.backward()
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in kept} - own)


def compiled(module, backend="aot_eager"):
    return torch.compile(module, backend=backend, fullgraph=True)


def by_default(module):
    return compiled(module, "aot_eager_default_partitioner")


def traced(module):
    """Trace it without ``torch.compile``."""
    return aot_module(module, nop, partition_fn=min_cut_rematerialization_partition)


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    ("tracer", "block", "act"),
    [
        pytest.param(compiled, Residual, nn.Identity, marks=pytest.mark.slow),
        (compiled, Residual, nn.Tanh),  # Tanh saves what the next layer sketches: the sketch may wait for backward
        pytest.param(
            compiled, Recomputed, nn.GELU, marks=pytest.mark.newer_torch("its graphs keep more of recomputed blocks")
        ),
        (by_default, Residual, nn.Identity),
        (traced, Residual, nn.Tanh),
    ],
)
def test_each_sketch_is_drawn_once_in_a_step_and_saves_what_it_does_uncompiled(tracer, block, act, drawn):
    plain, x = model(block, act), torch.randn(64, 8)
    uncompiled = saved_bytes(plain, x)
    run = tracer(plain)
    saved_bytes(run, x)
    drawn.clear()

    assert saved_bytes(run, x) <= uncompiled
    assert len(drawn) == len({seed.item() for seed in drawn}) == 5


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layers_that_read_one_input_save_one_sketch_of_it_as_uncompiled(backend, drawn):
    table = SharingTable()
    plain, x = nn.Sequential(Attention(table), Attention(table)), torch.randn(64, 8)
    uncompiled = saved_bytes(plain, x)
    run = compiled(plain, backend)
    saved_bytes(run, x)
    drawn.clear()

    assert saved_bytes(run, x) <= uncompiled
    assert len(drawn) == len({seed.item() for seed in drawn}) == 2


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_sketch_that_the_partitioner_recomputes_is_drawn_once(budget, drawn):
    x = torch.randn(64, 8)
    with partitioning.patch(activation_memory_budget=budget):
        run = compiled(model(Residual, nn.GELU))
        run(x).sum().backward()
    drawn.clear()
    loss = run(x).sum()
    before = len(drawn)
    loss.backward()

    assert before < len(drawn) == 5
