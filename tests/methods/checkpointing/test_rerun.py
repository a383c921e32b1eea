"""Blocks that write their own buffers, recomputed: gradients and buffers are those of the model that is not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from actbench.methods.checkpointing.recomputed import RecomputedForward
from actbench.packing import Identity, SavedTensors
from actbench.packing.hooked import HookedForward
from actbench.packing.hooked.hooks import Hooks
from actbench.simulator import fake
from actbench.simulator.tracker import StorageTracker
from actbench.units import KIB

WIDTH = 8


class Mean(nn.Module):
    """Subtracts a running mean, which it reads as it was and as it is then; ``how`` says by what it is written."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how != "made":
            self.register_buffer("mean", None if how == "first none" else torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        batch = x.detach().mean(0)
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", batch * 2)
        before = self.mean.clone()
        if self.how == "in place":
            self.mean.lerp_(batch, 0.3)
        elif self.how == "past autograd":
            self.mean.data.mul_(0.7).add_(0.3 * batch)
        else:
            self.mean = self.mean.lerp(batch, 0.3)
        self.steps += 1
        return x * torch.sigmoid(before) * self.scale - self.mean / self.steps


class Renorm(nn.BatchNorm1d):
    """Reads its running statistics in training, which torch's own does not."""

    def forward(self, x):
        shift = self.running_mean.clone()
        return super().forward(x) + shift


KINDS = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "another norm": lambda: Renorm(WIDTH),
    **{how: lambda how=how: Mean(how) for how in ("in place", "past autograd", "replaced", "made", "first none")},
}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), KINDS[kind](), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.inner(x).tanh()


class Model(nn.Module):
    """Its middle block is called twice."""

    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, x):
        first, twice, last = self.blocks
        return last(twice(twice(first(x))))


def recomputed(model, hooked=False):
    for block in model.blocks:
        RecomputedForward(block).bind()
    if hooked:  # everything is left as it is, so that gradients stay exact
        HookedForward(model, Hooks(SavedTensors(Identity()), 8, {})).bind()
    return model


def step(model, x, backwards=1):
    """Return output and gradients of a step of training, and the buffers after it."""
    torch.manual_seed(int(x[0, 0] * 1e6))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.zero_grad()
    y = model(x)
    for left in reversed(range(backwards)):
        y.square().mean().backward(retain_graph=left > 0)
    found = [y.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
    optimizer.step()
    return found


def near(first, second):
    """Within rounding: under hooks the gradients of a block that is called twice are added up in another order."""
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(first, second, strict=True))


@pytest.fixture(autouse=True)
def _wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_buffers_of_several_steps_are_exact(kind, hooked):
    exact = Model(kind)
    model = recomputed(copy.deepcopy(exact), hooked)
    for _ in range(3):
        x = torch.randn(16, WIDTH)
        assert near(step(exact, x), step(model, x))

    assert exact.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", ["spectral norm", "in place", "replaced", "made"])
def test_a_graph_that_is_kept_is_recomputed_as_it_was(kind):
    exact = Model(kind)
    model, x = recomputed(copy.deepcopy(exact)), torch.randn(16, WIDTH)

    assert near(step(exact, x, backwards=2), step(model, x, backwards=2))


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_backward_leaves_every_buffer_the_tensor_and_the_version_that_it_was(hooked):
    """Somebody else, such as DistributedDataParallel or another graph, may hold it."""
    model = recomputed(Model("in place"), hooked)
    loss = model(torch.randn(16, WIDTH)).sum()
    before = [(buffer, buffer._version) for buffer in model.buffers()]
    loss.backward()

    assert all(a is b and a._version == v for a, (b, v) in zip(model.buffers(), before, strict=True))


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
def test_a_second_run_that_fails_puts_the_buffers_back(hooked):
    model = recomputed(Model("in place"), hooked)
    loss = model(torch.randn(16, WIDTH)).sum()
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.blocks[1].inner[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()

    assert all(a is b and torch.equal(a, value) for a, (b, value) in zip(model.buffers(), before, strict=True))


@pytest.mark.slow
def test_a_compiled_model_is_exact_too():
    exact = Model("in place")
    for module in exact.modules():
        module.p = 0.0  # dropout of a compiled model draws other masks
    model = recomputed(copy.deepcopy(exact))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(16, WIDTH)
        for one, other in zip(step(exact, x), step(compiled, x), strict=True):
            torch.testing.assert_close(one, other)


class Table(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.register_buffer("table", torch.zeros(256, KIB // 8))

    def forward(self, x):
        if self.writes:
            self.table[:16, :WIDTH] = x.detach()
        return x * self.table[0, :WIDTH].cos()


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_of_large_buffers_only_those_that_are_written_wait_for_backward(writes, simulated):
    block, mode = Table(writes), fake.fake_mode()
    RecomputedForward(block).bind()
    if simulated:
        with fake.faked(block, mode), mode:
            packed = live_bytes(block)
    else:
        packed = live_bytes(block)

    assert packed == 256 * KIB * writes + torch.get_rng_state().nbytes


def live_bytes(block):
    x = torch.randn(16, WIDTH, requires_grad=True)
    with StorageTracker() as ledger:
        ledger.add([x, *block.buffers()])
        before = ledger.live_bytes
        y = block(x)
        after = ledger.live_bytes - before - y.nbytes
        y.sum().backward()
    return after
