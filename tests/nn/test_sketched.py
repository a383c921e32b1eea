import copy
import functools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from actbench import fake
from actbench.codecs.sketch import KINDS, Sketching
from actbench.nn import sketched as module_under_test
from actbench.nn.sharing import SharingTable
from actbench.nn.sketched import Sketched, sketched

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


def gradients(layer, x, weights):
    for tensor in [x, *layer.parameters()]:
        tensor.grad = None
    (layer(x) * weights).sum().backward()
    return x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("shape", [(6,), (10, 6), (2, 5, 6), (2, 3, 4, 6), (0, 6), (1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_all_but_the_weight_gradient_are_exact(make, shape, dtype, kind):
    exact, layer = (each.to(dtype) for each in pair(make, Sketching(kind, 0.5)))
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weights = torch.randn(*shape[:-1], 4, dtype=dtype)

    assert torch.equal(layer(x), exact(x))
    (dx, _, db), (dx_found, dw_found, db_found) = gradients(exact, x, weights), gradients(layer, x, weights)
    torch.testing.assert_close(dx_found, dx)
    assert dw_found.shape == layer.weight.shape
    assert dw_found.dtype == dtype
    if db is not None:
        torch.testing.assert_close(db_found, db)


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


@pytest.mark.parametrize("kind", KINDS)
def test_an_autocast_weight_gradient_is_near_the_float32_one(kind):
    _, layer = pair(sketching=Sketching(kind, dim=3))
    x = torch.randn(64, 6)
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(x)
        out.float().square().sum().backward()
        found.append(layer.weight.grad)

    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_non_contiguous_inputs_and_gradients(make, kind):
    _, layer = pair(make, Sketching(kind, 0.5))
    results = []
    for lay_out in (lambda t: t, lambda t: t.contiguous()):
        x = lay_out(torch.arange(60.0).view(6, 10).t()).requires_grad_()
        torch.manual_seed(0)
        results.append(gradients(layer, x, lay_out(torch.arange(40.0).view(4, 10).t())))

    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


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


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_the_weight_gradient_is_unbiased(make, kind):
    exact, layer = pair(make, Sketching(kind, dim=4))
    check_unbiased(exact, layer, layer)


@pytest.mark.parametrize("kind", ["gaussian", "hadamard", "rows", "wta"])
def test_the_weight_gradient_is_unbiased_when_the_recomputation_draws_another_seed(kind):
    """A key on ctx would be the first forward's beside the recomputation's sketch: that estimate's mean is another."""
    exact, layer = pair(sketching=Sketching(kind, dim=4))
    again = functools.partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
    check_unbiased(exact, layer, again)


def check_unbiased(exact, layer, run, trials=1500):
    torch.manual_seed(0)
    x, weights = torch.randn(10, 6) + 1, torch.randn(10, 4) + 1
    _, truth, _ = gradients(exact, x.requires_grad_(), weights)
    found = []
    for _ in range(trials):
        layer.weight.grad = None
        (run(x) * weights).sum().backward()
        found.append((layer.weight.grad * truth).sum() / truth.square().sum())
    found = torch.stack(found)
    error = found.std() / trials**0.5

    assert abs(found.mean() - 1) < 4 * error
    assert abs(1.1 * found.mean() - 1) > 4 * error  # a scale 10 % off would be seen


@pytest.mark.parametrize("kind", KINDS)
def test_re_entrant_checkpointing_retained_graphs_and_several_calls(kind):
    _, layer = pair(sketching=Sketching(kind, 0.5))
    x = torch.randn(10, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    loss = (layer(x) + layer(2 * x)).sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()

    assert torch.isfinite(layer.weight.grad).all()
    assert not torch.equal(once, layer.weight.grad)


def test_a_second_derivative_is_refused():
    _, layer = pair()
    x = torch.randn(10, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def weight_gradient(layer, x):
    layer.weight.grad = None
    layer(x).square().sum().backward()
    return layer.weight.grad


def test_each_step_has_a_fresh_seed_and_manual_seed_repeats_it():
    _, layer = pair()
    x = torch.randn(10, 6)
    torch.manual_seed(0)
    first, second = weight_gradient(layer, x), weight_gradient(layer, x)
    torch.manual_seed(0)

    assert not torch.equal(first, second)
    assert torch.equal(weight_gradient(layer, x), first)


def test_dropout_masks_stay_as_they_are():
    exact = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6), nn.Dropout())
    model = copy.deepcopy(exact)
    for index in (0, 2):
        model[index] = sketched(model[index], HALF, SharingTable())
    x = torch.randn(50, 6)
    results = []
    for each in (exact, model):
        torch.manual_seed(0)
        results.append(each(x))

    assert torch.equal(*results)


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
    model.k.sketching = Sketching("rademacher", 0.5)
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
    fresh = module_under_test.fresh_seed
    monkeypatch.setattr(module_under_test, "fresh_seed", lambda: drawn.append(fresh()) or drawn[-1])
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


def test_identity_is_kept():
    linear = nn.Linear(6, 4)
    linear.note, called = "mine", []
    linear.register_forward_hook(lambda module, *_: called.append(module))
    linear.eval()
    layer = sketched(linear, HALF, SharingTable())
    layer(torch.ones(2, 6))

    assert isinstance(layer, nn.Linear)
    assert layer.weight is linear.weight
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert (layer.note, layer.training, called) == ("mine", False, [layer])
    conv = sketched(Conv1D(4, 6), HALF, SharingTable())
    assert isinstance(conv, Conv1D)
    assert isinstance(conv, Sketched)


def test_subclasses_have_no_sketched_form():
    class Adapted(nn.Linear):
        pass

    assert sketched(Adapted(6, 4), HALF, SharingTable()) is None
    assert sketched(nn.Conv1d(6, 4, 1), HALF, SharingTable()) is None


def test_tied_weights_gather_both_gradients():
    _, layer = pair()
    other = sketched(nn.Linear(6, 4), HALF, layer.sharing)
    other.weight = layer.weight
    (layer(torch.randn(10, 6)) + other(torch.randn(10, 6))).sum().backward()

    assert torch.isfinite(layer.weight.grad).all()


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_exact_and_draws_a_fresh_sketch(kind):
    torch.compiler.reset()  # one function may be compiled for only so many layers
    exact, layer = pair(sketching=Sketching(kind, 0.5))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(10, 6, requires_grad=True)
    found = []
    for _ in range(2):
        layer.weight.grad = x.grad = None
        out = compiled(x)
        out.square().sum().backward()
        found.append(layer.weight.grad)
    dx, _, _ = gradients(exact, x.detach().clone().requires_grad_(), 2 * exact(x).detach())

    assert torch.equal(out, exact(x))
    torch.testing.assert_close(x.grad, dx)
    assert not torch.equal(*found)


def test_distributed_data_parallel(tmp_path):
    _, layer = pair()
    x = torch.randn(10, 6)
    torch.manual_seed(0)
    expected = weight_gradient(layer, x).clone()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(layer)
        torch.manual_seed(0)
        layer.zero_grad()
        parallel(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()

    torch.testing.assert_close(layer.weight.grad, expected)
