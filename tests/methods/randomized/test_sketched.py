import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from actbench.methods.randomized.ops.sketch import KINDS, Sketching
from actbench.methods.randomized.sketched import Sketched, sketched
from actbench.packing.savedtensors import SharingTable

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


def gradients(layer, x, weights):
    for tensor in [x, *layer.parameters()]:
        tensor.grad = None
    (layer(x) * weights).sum().backward()
    return x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind"),
    [
        *(("linear", (10, 6), torch.float32, kind) for kind in KINDS),
        *(
            ("linear", (10, 6), dtype, kind)
            for dtype in (torch.float64, torch.bfloat16)
            for kind in ("gaussian", "wta")
        ),
        *(("linear", shape, torch.float32, "rows") for shape in ((6,), (2, 3, 4, 6), (0, 6), (1, 6))),
        *(("linear", shape, torch.float32, "dct") for shape in ((2, 5, 6), (0, 6), (1, 6))),
        *((name, (10, 6), torch.float32, kind) for name, kind in (("no bias", "rademacher"), ("conv1d", "norm"))),
    ],
)
def test_forward_and_all_but_the_weight_gradient_are_exact(name, shape, dtype, kind):
    exact, layer = (each.to(dtype) for each in pair(LAYERS[name], Sketching(kind, 0.5)))
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weights = torch.randn(*shape[:-1], 4, dtype=dtype)

    assert torch.equal(layer(x), exact(x))
    (dx, _, db), (dx_found, dw_found, db_found) = gradients(exact, x, weights), gradients(layer, x, weights)
    torch.testing.assert_close(dx_found, dx)
    assert dw_found.shape == layer.weight.shape
    assert dw_found.dtype == dtype
    if db is not None:
        torch.testing.assert_close(db_found, db)


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


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("name", "kind"), [("linear", "gaussian"), ("conv1d", "rademacher")])
def test_the_weight_gradient_is_unbiased(name, kind):
    exact, layer = pair(LAYERS[name], Sketching(kind, dim=4))
    check_unbiased(exact, layer, layer)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("kind", ["rows", "gaussian", "hadamard", "wta"])
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
    torch.manual_seed(0)
    _, layer = pair(sketching=Sketching(kind, 0.5))
    x = torch.randn(10, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    loss = (layer(x) + layer(2 * x)).square().sum()  # transforms of all-ones gradients have zeros in most rows
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()

    assert torch.isfinite(layer.weight.grad).all()
    assert not torch.equal(once, layer.weight.grad)


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
