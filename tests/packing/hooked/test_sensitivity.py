"""Sharing bits out by sensitivity: it finds what matters, costs what it says, and leaves no trace."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actbench.methods.gact import sensitivity
from actbench.methods.gact.sensitivity import Probing, _rows
from actbench.packing import SiteState
from actbench.packing.hooked import HookedForward
from actbench.simulator import fake


class Uneven(nn.Module):
    """Eight branches; an error in what one of them saves matters a thousand times as much."""

    def __init__(self, loud=5):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.second = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.loud = loud

    def forward(self, x):
        branches = [two(one(x).relu()) for one, two in zip(self.first, self.second, strict=True)]
        return sum(branch * (1000 if index == self.loud else 1) for index, branch in enumerate(branches)).mean()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(16, 64, 3), nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.out, self.runs = nn.Linear(64, 4), 0

    def forward(self, x):
        self.runs += 1
        return self.out(self.drop(self.norm(self.conv(x)).relu()).mean(2))


class Around(nn.Module):
    """A model that is recomputed as a whole."""

    def __init__(self, model, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


def places_of(model):
    return list(HookedForward.of(model).hooks.sites)


def test_a_tensor_that_matters_more_gets_more_bits(hook):
    model = hook(Uneven(), bits=2, probing=Probing(2, 1000))
    model(torch.randn(32, 64)).backward()
    sites = [site for site in places_of(model) if site.elements]
    bits = [site.bits for site in sites]

    assert len(sites) == 8
    assert bits[5] == 8
    assert max(bits[:5] + bits[6:]) < 8
    assert sum(site.elements * site.bits for site in sites) <= 2 * sum(site.elements for site in sites)


def test_no_more_backward_passes_than_groups_and_one(hook, monkeypatch):
    passes = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: passes.append(1) or grad(*args, **kwargs))
    for groups, expected in ((64, 8 + 1), (3, 3 + 1)):
        passes.clear()
        hook(Uneven(), probing=Probing(4, 1000, groups=groups))(torch.randn(32, 64))

        assert len(passes) == expected


def test_it_leaves_no_trace(hook):
    exact = Network()
    plain, model = hook(copy.deepcopy(exact)), hook(copy.deepcopy(exact), probing=Probing(8, 1))
    model.conv.weight.grad = held = torch.randn_like(model.conv.weight)
    model.norm.eval()
    plain.norm.eval()
    x, before, results = torch.randn(32, 16, 16), held.clone(), []
    for each in (plain, model):
        torch.manual_seed(7)
        results.append([each(x).sum(), torch.rand(3), *each.buffers()])

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # dropout drew the same masks
    assert torch.equal(model.conv.weight.grad, before)
    assert all(p.grad is None for name, p in model.named_parameters() if name != "conv.weight")
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert (plain.runs, model.runs) == (1, 2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_count_a_batch_once(hook, momentum):
    exact = Network()
    exact.norm.momentum = momentum
    model = hook(copy.deepcopy(exact), probing=Probing(8, 1))
    for each in (exact, model):
        torch.manual_seed(7)
        for _ in range(2):
            each(torch.randn(32, 16, 16))

    assert model.norm.momentum == momentum
    assert all(torch.equal(a, b) for a, b in zip(exact.buffers(), model.buffers(), strict=True))


class Remembering(nn.Module):
    """Writes into its buffers, puts others in their place, and draws from all that has random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", None)
        self.alias = nn.Module()
        self.alias.register_buffer("mean", self.mean)

    def forward(self, x):
        x = self.first(x) * self.mean.add(1)
        with torch.no_grad():
            self.alias.mean.lerp_(x.mean(0), 0.1)
            self.count = self.count + 1
            self.seen = x[:1].clone()
        return self.second(x + random.random() + np.random.rand() + torch.rand(()))


def test_buffers_and_random_numbers_are_as_if_it_had_not_been(hook):
    exact = Remembering()
    plain, model = hook(copy.deepcopy(exact)), hook(copy.deepcopy(exact), probing=Probing(8, 2))
    x, results = torch.randn(32, 64), []
    mean = model.mean
    for each in (plain, model):
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        outputs = [each(x) for _ in range(3)]
        results.append([*outputs, *each.buffers(), torch.rand(3), random.random(), np.random.rand()])

    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results, strict=True))
    assert model.mean is mean
    assert model.alias.mean is mean


def test_a_buffer_that_an_earlier_graph_needs_is_not_touched(hook):
    """It would count as changed in place, and the backward pass of the earlier step would be refused."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
            self.register_buffer("scale", torch.rand(64))

        def forward(self, x):
            return self.norm(self.first(x)) * self.scale

    model = hook(Scaled(), probing=Probing(8, 1))
    x = torch.randn(32, 64)
    losses = [model(x).sum() for _ in range(2)]
    torch.stack(losses).sum().backward()

    assert model.first.weight.grad.isfinite().all()


def test_it_is_due_before_the_first_pass_and_then_every_so_often(hook):
    model = hook(Network(), probing=Probing(8, 3))
    extra = []
    for _ in range(7):
        before = model.runs
        model(torch.randn(32, 16, 16))
        extra.append(model.runs - before - 1)

    assert extra == [1, 0, 0, 1, 0, 0, 1]


def test_fake_tensors_have_no_values_to_do_so_with(hook):
    model, mode = hook(Network(), bits=4, probing=Probing(4, 1)), fake.fake_mode()
    with fake.faked(model, mode), mode:
        model(torch.randn(32, 16, 16)).sum().backward()

    assert model.runs == 1
    assert {site.bits for site in places_of(model)} == {4}


def test_the_first_rows_of_a_batch_are_used():
    x, mask, label = torch.randn(20, 5, requires_grad=True), torch.ones(20, 5), torch.arange(20)
    (args, kwargs) = _rows(((x, [mask]), {"labels": label, "flag": True}), 8)

    assert torch.equal(args[0], x[:8])
    assert (args[0].requires_grad, args[0].grad_fn) == (True, None)
    assert torch.equal(args[1][0], mask[:8])
    assert torch.equal(kwargs["labels"], label[:8])
    assert kwargs["flag"] is True


def test_a_scalar_beside_a_batch_stays():
    count = torch.tensor(20)  # of items, as transformers' Trainer gives it
    (x, given) = _rows((torch.randn(20, 5), count), 8)

    assert (len(x), given) == (8, count)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.randn(20, 5), torch.randn(7, 5)),  # not of one batch
        (torch.randn(8, 5), torch.randn(8)),  # few enough
        ("no tensor",),
    ],
)
def test_other_inputs_are_used_whole(inputs):
    found = _rows(inputs, 8)

    assert [getattr(leaf, "shape", leaf) for leaf in found] == [getattr(leaf, "shape", leaf) for leaf in inputs]


def test_a_cache_of_keys_and_values_is_not_filled():
    from transformers import DynamicCache

    cache = DynamicCache()
    (_, given) = _rows((torch.randn(20, 5), cache), 8)
    given.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), 0)

    assert cache.get_seq_length() == 0


def test_a_loss_of_the_model_is_the_one_that_counts(hook):
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            loud, quiet = self.other(self.layer(x).tanh()), self.other(self.layer(x).exp())
            return {"loss": loud.sum() + 0 * quiet.sum(), "extra": 1000 * quiet}

    model = hook(Returning(), probing=Probing(5, 1))
    model(torch.randn(32, 64))
    bits = {site.path.split("Backward")[0]: site.bits for site in places_of(model) if site.elements}

    assert bits["Tanh"] > bits["Exp"]


def test_tensors_of_a_kind_are_cut_into_as_many_runs_as_they_have_elements():
    def some(count, elements):
        return [SiteState(str(index), 4, elements=elements) for index in range(count)]

    many, few, shared = some(30, 100), some(2, 10), some(1, 0)
    runs = list(sensitivity._groups([many, few, shared], 12))

    assert len(runs) <= 12
    assert [site for run in runs for site in run] == [*many, *few]
    assert max(len(run) for run in runs[:-1]) == 3  # 1 + int(10 * 3000 / 3020) runs of 30
    assert runs[-1] == few


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_users_own_checkpoints(hook, step, near, use_reentrant, inside):
    """Of those inside of the model the inputs are packed, and what is recomputed is as torch keeps it."""

    class Recomputing(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=use_reentrant) if inside else layer(x)
            return x

    sensitivity._warn_of_recomputation.cache_clear()
    exact = Recomputing(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3))).eval()
    model = hook(copy.deepcopy(exact), bits=7, probing=Probing(8, 1))
    x = torch.randn(32, 64, requires_grad=True)
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found = step(model, x) if inside else step(Around(model, use_reentrant), x)
    assert near(found, step(exact, x), within=0.05)
    assert [w for w in caught if "re-entrant" in str(w.message)] == caught[: use_reentrant and inside]
    assert {site.bits for site in places_of(model) if site.elements} == {7 if use_reentrant and inside else 8}
