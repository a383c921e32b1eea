"""What every layer that packs its input keeps, for how long, and what backward makes of it."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.methods.actnn.layers.savedinput import SavedInput
from actbench.methods.actnn.ops import groupquant
from actbench.packing import Identity, SavedTensors, SiteState
from actbench.simulator import fake


@pytest.mark.parametrize("kind", ["conv2d", "linear", "batchnorm1d", "evaluated", "layernorm", "groupnorm"])
def test_one_piece_is_decoded_at_a_time(kind, monkeypatch, pair, results):
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), chunk=3)
    rows_of, sizes, alive = SavedInput.rows, [], []

    def watched(self, piece):
        assert all(reference() is None for reference in alive)
        out = rows_of(self, piece)
        sizes.append(out.numel())
        alive.append(weakref.ref(out.untyped_storage()))
        return out

    monkeypatch.setattr(SavedInput, "rows", watched)
    results(layer, x)

    row, rows = x[0].numel(), x.shape[0]
    once = [(rows * (i + 1) // 3 - rows * i // 3) * row for i in range(3)]
    assert sizes == once * (2 if kind == "batchnorm1d" else 1)


def test_what_is_kept_is_packed_and_dies_with_backward(kind, pair, saved_by, own):
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)))
    storages, y = saved_by(lambda: layer(x.requires_grad_()))
    packed = storages - own(layer)
    codes = groupquant.packed_bytes(x.numel(), 2, 32)

    assert x.untyped_storage() not in packed
    assert (
        codes in {storage.nbytes() for storage in packed} or codes <= sum(s.nbytes() for s in packed) < 0.5 * x.nbytes
    )
    alive = [weakref.ref(storage) for storage in packed]
    del storages, packed
    y.sum().backward()
    assert all(reference() is None for reference in alive)


def test_nothing_is_kept_without_gradients(kind, pair, saved_by):
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)))
    with torch.no_grad():
        assert saved_by(lambda: layer(x.requires_grad_()))[0] == set()
    layer.requires_grad_(False)
    assert saved_by(lambda: layer(x.detach()))[0] == set()


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "x bias", "weight bias"])
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(
    "kind", ["conv2d", "transposed2d", "linear", "batchnorm2d", "evaluated", "layernorm", "groupnorm"]
)
def test_only_what_is_wanted_is_computed_and_kept(kind, chunk, wanted, pair, saved_by, own):
    exact, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), bits=8, chunk=chunk)
    found = []
    for each in (exact, layer):
        leaves = {"x": x.clone(), "weight": each.weight, "bias": each.bias}
        for key, leaf in leaves.items():
            leaf.requires_grad_(key in wanted.split())
        storages, y = saved_by(lambda each=each, leaves=leaves: each(leaves["x"]))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        found.append([leaf.grad for leaf in leaves.values()])
    needs_x = "weight" in wanted or ("x" in wanted and kind in ("batchnorm2d", "layernorm", "groupnorm"))

    packed = sum(storage.nbytes() for storage in storages - own(layer) - {y.untyped_storage()})
    assert (packed >= groupquant.packed_bytes(x.numel(), 8, 32)) == needs_x
    assert (layer.site.elements > 0) == needs_x
    for expected, one in zip(*found, strict=True):
        assert (expected is None) == (one is None)
        if expected is not None:
            assert (one - expected).norm() < 0.02 * expected.norm()


def test_retained_graphs_second_derivatives_and_checkpoints(kind, pair, results):
    _, layer, x = pair(kind, SavedTensors(Identity()))
    layer.double()
    x = x.double().requires_grad_()
    expected = results(layer, x)[1]
    y = layer(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    for again in (True, False):
        (found,) = torch.autograd.grad(y, x, weights, retain_graph=again)
        torch.testing.assert_close(found, expected)
    for use_reentrant in (True, False):
        leaf = x.detach().clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=use_reentrant).backward(weights)
        torch.testing.assert_close(leaf.grad, expected)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(layer(x), x, weights, create_graph=True)


def test_several_calls_in_one_step_keep_each_their_input(pair, results):
    _, layer, x = pair("linear", SavedTensors(GroupQuantization(32)), bits=8)
    results(layer, x)
    one = layer.weight.grad.clone()
    layer.zero_grad()
    (layer(x).sum() + layer(2 * x).sum()).backward()
    (expected,) = torch.autograd.grad(layer(3 * x).sum(), layer.weight)

    assert not torch.equal(one, layer.weight.grad)
    assert (layer.weight.grad - expected).norm() < 0.02 * expected.norm()


def test_layers_with_one_input_keep_it_once(saved_by, own):
    packer, x = SavedTensors(GroupQuantization(32)), torch.randn(10, 64)
    q, k, v, norm = (
        compressed(layer, packer, SiteState(str(i), 2))
        for i, layer in enumerate([nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 64), nn.LayerNorm(64)])
    )
    storages, _ = saved_by(lambda: [layer(x) for layer in (q, k, v)])
    with_norm, _ = saved_by(lambda: [layer(x) for layer in (q, norm)])

    assert sum(s.nbytes() for s in storages) == groupquant.packed_bytes(10 * 64, 2, 32)
    statistics = 2 * 10 * 4
    assert sum(s.nbytes() for s in with_norm - own(norm)) == groupquant.packed_bytes(10 * 64, 2, 32) + statistics
    assert k.site.owner is v.site.owner is q.site
    assert (q.site.elements, k.site.elements) == (10 * 64, 0)


@pytest.mark.sampled(fast=6, slow=6)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_fake_tensors_keep_the_same_bytes(kind, chunk, pair, saved_by, own):
    if kind == "average":
        pytest.skip("torch's own layer reads how many batches it has seen, which a fake tensor does not know")
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)), chunk=chunk)
    real, _ = saved_by(lambda: layer(x.requires_grad_()))
    mode = fake.fake_mode()
    with fake.faked(layer, mode), mode:
        x = torch.randn(x.shape, requires_grad=True)
        storages, y = saved_by(lambda: layer(x))
        y.sum().backward()
        assert x.grad.shape == x.shape
        found = sorted(s.nbytes() for s in storages - own(layer))

    assert found == sorted(s.nbytes() for s in real - own(layer))


@pytest.mark.parametrize("kind", ["conv2d", "linear", "batchnorm2d", "layernorm", "groupnorm"])
def test_the_gradient_of_a_watched_place_is_seen(kind, pair):
    _, layer, x = pair(kind, SavedTensors(GroupQuantization(32)))
    layer.site.watched = True
    y = layer(x.requires_grad_())
    weights = torch.randn_like(y)
    y.backward(weights)

    torch.testing.assert_close(layer.site.gradients, weights.square().sum())
    assert layer.site.ranges is not None
