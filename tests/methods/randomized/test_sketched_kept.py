import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from actbench.methods.randomized import sketched as module_under_test
from actbench.methods.randomized.ops.sketch import KINDS, Sketching
from actbench.methods.randomized.sketched import sketched
from actbench.packing.savedtensors import SharingTable
from actbench.simulator import fake

HALF = Sketching(ratio=0.5)
LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "no bias": lambda: nn.Linear(6, 4, bias=False),
    "conv1d": lambda: Conv1D(4, 6),
}


def pair(make=LAYERS["linear"], sketching=HALF):
    """An exact layer and a sketched one with parameters of its own."""
    exact = make()
    return exact, sketched(copy.deepcopy(exact), sketching, SharingTable())


def saved(run):
    """Tensors that a forward saves, parameters left out, and its result."""
    found = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
    with hooks:
        result = run()
    return found, result


def key_bytes(kind, size):
    """A seed of 8 bytes, or the int32 number of every row kept."""
    return 4 * size if kind in ("norm", "wta") else 8


def kept_bytes(tensors, layer):
    own = {p.untyped_storage() for p in layer.parameters()}
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors} - own)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_followed(make, dtype, kind):
    exact, layer = pair(make, Sketching(kind, 0.5))
    x = torch.randn(8, 6, requires_grad=True)
    with torch.autocast("cpu", dtype):
        expected = exact(x)
        tensors, found = saved(lambda: layer(x))
    found.float().sum().backward()
    with torch.autocast("cpu", dtype):
        layer(x).sum().backward()  # backward inside of autocast

    assert torch.equal(found, expected)
    assert found.dtype == dtype
    assert kept_bytes(tensors, layer) == 4 * 6 * dtype.itemsize + key_bytes(kind, 4)
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32


@pytest.mark.parametrize(("rows", "size"), [(100, 50), (7, 3), (2, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_the_sketch_and_its_key(rows, size, kind):
    _, layer = pair(sketching=Sketching(kind, 0.5))
    tensors, _ = saved(lambda: layer(torch.randn(rows, 6, requires_grad=True)))

    assert kept_bytes(tensors, layer) == size * 6 * 4 + key_bytes(kind, size)
    assert any(t.untyped_storage() is layer.weight.untyped_storage() for t in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exact_layer_runs_where_a_sketch_would_be_no_smaller(kind):
    _, layer = pair(sketching=Sketching(kind, dim=8))
    x = torch.randn(8, 6)
    tensors, _ = saved(lambda: layer(x))

    assert [t.untyped_storage() for t in tensors] == [x.untyped_storage()]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("kind", ["gaussian", "wta"])
def test_nothing_is_kept_where_no_gradient_needs_it(make, kind):
    _, layer = pair(make, Sketching(kind, 0.5))
    x = torch.randn(8, 6)
    with torch.no_grad():
        assert saved(lambda: layer(x))[0] == []
    only_weight, _ = saved(lambda: layer(x))
    assert layer.weight.untyped_storage() not in {t.untyped_storage() for t in only_weight}
    layer.weight.requires_grad = False
    assert kept_bytes(saved(lambda: layer(x.requires_grad_()))[0], layer) == 0


class Attention(nn.Module):
    """Three layers that read one input."""

    def __init__(self):
        super().__init__()
        table = SharingTable()
        self.q, self.k, self.v = (sketched(nn.Linear(6, 6), HALF, table) for _ in range(3))
        self.table = table

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_one_input_keep_one_sketch(kind):
    model, x = Attention(), torch.randn(10, 6)
    for layer in (model.q, model.k, model.v):
        layer.sketching = Sketching(kind, 0.5)
    tensors, _ = saved(lambda: model.q(x) + model.k(x) + model.v(x))

    assert kept_bytes(tensors, model) == 5 * 6 * 4 + key_bytes(kind, 5)


def test_layers_that_want_other_sketches_of_one_input_keep_their_own():
    model = Attention()
    model.k.sketching = Sketching("gaussian", 0.5)
    model.v.sketching = Sketching(ratio=0.2)
    x = torch.randn(10, 6)
    tensors, _ = saved(lambda: model.q(x) + model.k(x) + model.v(x))

    assert kept_bytes(tensors, model) == (5 + 5 + 2) * 6 * 4 + 3 * 8


def test_an_input_changed_in_place_between_two_layers_has_two_sketches():
    model, x = Attention(), torch.randn(10, 6)
    first = model.q(x)
    x.add_(1)
    tensors, _ = saved(lambda: model.k(x))

    assert first.requires_grad
    assert kept_bytes(tensors, model) == 5 * 6 * 4 + 8
    assert len(model.table) == 1, "the sketch of the old values is not offered any more"


def test_no_sketch_outlives_backward():
    model, x = Attention(), torch.randn(10, 6)
    tensors, result = saved(lambda: model(x))
    storages = [weakref.ref(t.untyped_storage()) for t in tensors if t.dtype == torch.int64]
    del tensors
    assert any(storage() is not None for storage in storages)
    result.sum().backward()

    assert all(storage() is None for storage in storages)
    assert all(reference() is None for entries in model.table._packed.values() for reference in entries.values())


def test_one_sketch_serves_all_layers_of_a_recomputed_block(monkeypatch):
    drawn = []
    fresh = module_under_test.fresh_sketch
    monkeypatch.setattr(module_under_test, "fresh_sketch", lambda *args: drawn.append(fresh(*args)) or drawn[-1])
    model = Attention()
    loss = checkpoint(model, torch.randn(10, 6, requires_grad=True), use_reentrant=False).sum()
    drawn.clear()
    loss.backward()

    assert len(drawn) == 1


def test_a_deep_copy_is_independent():
    model = Attention()
    twin = copy.deepcopy(model)
    x = torch.randn(10, 6)
    model(x).sum().backward()

    assert twin.q.sharing is twin.k.sharing is twin.table is not model.table
    assert len(twin.table) == 0
    assert twin.q.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_keep_the_same_bytes(kind):
    model = Attention()
    for layer in (model.q, model.k, model.v):
        layer.sketching = Sketching(kind, 0.5)
    mode = fake.fake_mode()
    with fake.faked(model, mode), mode:
        x = torch.randn(10, 6)
        tensors, result = saved(lambda: model(x))
        own = {p.untyped_storage() for p in model.parameters()}
        names = {t.untyped_storage(): t.nbytes for t in tensors if t.untyped_storage() not in own}
        result.sum().backward()

    products = 2 * 10 * 6 * 4  # q and k, each needed for the other's gradient
    assert sum(names.values()) == 5 * 6 * 4 + key_bytes(kind, 5) + products
