import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import CODED, coded, compressed, small_codes
from actbench.packing import SavedTensors, SiteState, savedtensors
from actbench.packing.wrapped import Intercepted

X = torch.linspace(-3, 3, 2 * 4 * 6 * 6).view(2, 4, 6, 6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rules: pickle.loads(pickle.dumps(rules))])
def test_rules_are_copied_and_pickled(copied):
    rules = copied(small_codes())
    assert list(rules) == list(small_codes())
    with Intercepted(rules):
        y = F.relu(X.clone().requires_grad_())
    assert [t.dtype for t in y.grad_fn.saved_tensors if t is not None] == [torch.uint8]


def example(kind):
    if "Dropout" in kind.__name__:
        return kind()
    return kind() if kind is nn.ReLU else kind(3)


def batch(kind):
    dims = {"1": 3, "3": 5}.get(kind.__name__[-2], 4)
    return torch.randn([2, 3, 7, 6, 5][:dims])


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.__name__)
def test_a_layer_with_a_code_is_the_layer_in_all_else(kind):
    exact = example(kind)
    calls = []
    exact.register_forward_hook(lambda *_: calls.append(1))
    layer = coded(exact.eval())
    x = batch(kind).requires_grad_()

    assert isinstance(layer, kind)
    assert not layer.training
    assert torch.equal(layer(x), exact(x))
    assert len(calls) == 2
    for twin in (copy.deepcopy(coded(example(kind))), pickle.loads(pickle.dumps(coded(example(kind))))):
        assert type(twin) is type(layer)
        gradients = []
        for each in (twin, example(kind)):
            torch.manual_seed(0)
            gradients.append(torch.autograd.grad(each(x).square().sum(), x)[0])
        assert torch.equal(*gradients)


@pytest.mark.parametrize("layer", [nn.LeakyReLU(), nn.ReLU6(inplace=True), nn.Hardshrink(), nn.Threshold(0.1, 2)])
def test_other_rectifiers_keep_a_bit_too(layer):
    x = X.clone().requires_grad_()
    assert torch.equal(coded(layer)(x * 1), layer(x * 1))
    output = coded(layer)(x * 1)
    assert output.grad_fn.saved_tensors[0].nbytes == X.numel() // 8


def test_a_layer_without_a_code_or_with_a_forward_of_its_own_is_left_alone():
    bound = nn.ReLU()
    bound.forward = lambda x: x
    mine = type("Mine", (nn.ReLU,), {})()
    assert [coded(layer) for layer in (bound, mine, nn.GELU(), nn.AlphaDropout(), nn.Softmax(1))] == [None] * 5


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    "kind",
    [
        nn.ReLU,
        nn.Dropout,
        nn.MaxPool2d,
        pytest.param(nn.AvgPool2d, marks=pytest.mark.slow),
        pytest.param(nn.AdaptiveAvgPool2d, marks=pytest.mark.slow),
    ],
)
def test_layers_are_compiled_whole(kind):
    layer = coded(example(kind).eval() if kind is nn.Dropout else example(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 3, 7, 6, requires_grad=True)
        y = compiled(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(layer(x).sum(), x)[0])


def test_layers_with_a_code_are_among_the_compressed_ones():
    packer, site = SavedTensors(GroupQuantization()), SiteState("layer", 2)
    assert type(compressed(nn.ReLU(), packer, site)) is CODED[nn.ReLU]
    assert compressed(nn.ReLU6(), packer, site).steps.bits == 1
    assert compressed(nn.Softmax(1), packer, site) is None


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (nn.ReLU(), X.shape, torch.float32),
        (nn.ReLU(inplace=True), X.shape, torch.float32),
        (nn.Dropout2d(), (2, 4, 1, 1), torch.float32),
        (nn.MaxPool2d(3), (2, 4, 2, 2), torch.int64),
    ],
)
def test_a_ledger_is_told_what_the_codes_stand_for(layer, shape, dtype):
    with savedtensors.observing():
        y = coded(layer)(X.clone().requires_grad_() * 1)
    source = savedtensors.source_of(y.grad_fn.saved_tensors[0].untyped_storage())
    assert (source.shape, source.dtype) == (shape, dtype)
