import copy

import pytest
import torch
from torch import nn

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.layers import compressed
from actbench.packing import SavedTensors, SiteState

LAYERS = {
    "no rows": (lambda: nn.LayerNorm((4, 64)), (4, 64)),
    "many dimensions": (lambda: nn.LayerNorm((4, 6), eps=1e-3), (2, 3, 5, 4, 6)),
    "bare": (lambda: nn.LayerNorm(64, elementwise_affine=False), (3, 5, 64)),
    "groups": (lambda: nn.GroupNorm(4, 8), (5, 8, 9)),
    "instances": (lambda: nn.GroupNorm(8, 8, affine=False), (5, 8, 6, 5)),
    "one group": (lambda: nn.GroupNorm(1, 8), (5, 8, 3, 4, 5)),
    "one image": (lambda: nn.GroupNorm(2, 8), (1, 8, 6, 6)),
    "no space": (lambda: nn.GroupNorm(2, 64), (5, 64)),
}


def gradients(layer, x):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_shapes(make, shape, dtype, chunk):
    exact = make().to(dtype)
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), SiteState("", 8, chunk=chunk))
    x = torch.randn(shape).to(dtype)
    layer.packer.exclude.add([x])
    expected, found = gradients(exact, x), gradients(layer, x)

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    for one, other in zip(found[2:], expected[2:], strict=True):
        near = torch.finfo(dtype).eps * other.double().norm()
        assert (one.double() - other.double()).norm() <= (0 if chunk == 1 else 4 * near)


@pytest.mark.parametrize(
    ("make", "shape"), [(lambda: nn.LayerNorm(64), (5, 64)), (lambda: nn.GroupNorm(2, 8), (5, 8, 9))]
)
def test_halves_with_parameters_in_float32(make, shape):
    exact = make()
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), SiteState("", 8, chunk=3))
    x = torch.randn(shape).to(torch.bfloat16)
    layer.packer.exclude.add([x])

    for one, other in zip(gradients(layer, x), gradients(exact, x), strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= 2**-8 * other.double().norm()


@pytest.mark.parametrize("shape", [(1, 2), (1, 2, 1), (2, 3), (5,)])
def test_a_group_norm_refuses_what_torch_refuses(shape):
    exact = nn.GroupNorm(2, 2)
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), SiteState("", 8))
    errors = []
    for each in (exact, layer):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            each(torch.ones(shape, requires_grad=True))
        errors.append(str(caught.value))

    assert errors[0] == errors[1]
