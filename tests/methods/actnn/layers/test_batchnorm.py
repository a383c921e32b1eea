import copy

import pytest
import torch
from torch import nn

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.groups import Groups
from actbench.methods.actnn.layers.layers import compressed
from actbench.methods.actnn.ops import batchnorm
from actbench.packing import SavedTensors, SiteState

FEW = GroupQuantization(32)


def keeping(layer, codec=FEW, chunk=1):
    return compressed(copy.deepcopy(layer), SavedTensors(codec), SiteState("", 8, chunk=chunk))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.SyncBatchNorm(8)])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 8, 1), (1, 8, 1, 1), (2, 3, 4, 5, 6, 7), (0, 8, 3, 3)])
def test_what_torch_refuses_is_refused_and_counted_as_by_torch(layer, shape):
    outcomes = []
    for each in (copy.deepcopy(layer), keeping(layer)):
        try:
            each(torch.ones(shape, requires_grad=True))
            outcomes.append(("ran", int(each.num_batches_tracked)))
        except (ValueError, RuntimeError) as error:
            outcomes.append((str(error), int(each.num_batches_tracked)))

    assert outcomes[0] == outcomes[1]


def test_running_statistics_over_several_steps():
    for momentum in (0.1, None):
        exact = nn.BatchNorm2d(8, momentum=momentum)
        layer = keeping(exact)
        for step in range(4):
            x = torch.randn(5, 8, 4, 4, requires_grad=True) + step
            exact(x)
            layer(x).sum().backward()

        assert all(torch.equal(*each) for each in zip(layer.buffers(), exact.buffers(), strict=True))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_far_from_zero_in_pieces_is_as_good_as_at_once(mode):
    """The deviations are formed before they are multiplied: nothing cancels."""
    exact = nn.BatchNorm2d(8).train(mode == "train")
    x = 1000 + torch.randn(6, 8, 9, 9)
    truth = gradients(copy.deepcopy(exact).double(), x.double())
    whole = gradients(exact, x)
    layer = keeping(exact, chunk=4)
    layer.packer.exclude.add([x])
    pieces = gradients(layer, x)

    for true, one, other in zip(truth, whole, pieces, strict=True):
        assert (other - true).norm() <= 2 * (one - true).norm() + 1e-6 * true.norm()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_halves_in_pieces_are_as_near_the_truth_as_torchs(parameters, mode, channels_last):
    exact = nn.BatchNorm2d(8).to(parameters).train(mode == "train")
    x = torch.randn(6, 8, 9, 9).to(torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    layer = keeping(exact, chunk=4)
    layer.packer.exclude.add([x])

    truth = gradients(copy.deepcopy(exact).double(), x.double())
    for one, other, true in zip(gradients(layer, x), gradients(exact, x), truth, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert (one.double() - true).norm() < (other.double() - true).norm() + 2**-9 * true.norm()


PLANES = torch.randn(6, 8, 12, 11)
IN_REGISTERS = {
    "plane": (nn.BatchNorm2d(8), PLANES),
    "row": (nn.BatchNorm1d(8), torch.randn(6, 8, 132)),
    "volume": (nn.BatchNorm3d(4), torch.randn(2, 4, 5, 4, 7)),
    "bfloat16": (nn.BatchNorm2d(8), PLANES.bfloat16()),
    "all bfloat16": (nn.BatchNorm2d(8).bfloat16(), PLANES.bfloat16()),
    "frozen": (nn.BatchNorm2d(8).requires_grad_(False), PLANES),
    "double": (nn.BatchNorm2d(8).double(), PLANES.double()),
    "strided weight": (nn.BatchNorm2d(8), PLANES),
}
DECODED = {
    "channels last": (nn.BatchNorm2d(8), PLANES.to(memory_format=torch.channels_last)),
    "short rows": (nn.BatchNorm2d(64), torch.randn(6, 64, 6, 6)),
    "rows of no fours": (nn.BatchNorm2d(8), torch.randn(6, 8, 13, 13)),
    "evaluation": (nn.BatchNorm2d(8).eval(), PLANES),
    "rows of other bits": (nn.BatchNorm2d(8), PLANES),
}


@pytest.mark.parametrize("case", [*IN_REGISTERS, *DECODED])
def test_codes_that_are_decoded_in_registers_give_what_decoded_ones_give(case, monkeypatch):
    exact, x = (IN_REGISTERS | DECODED)[case]
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.uniform_(0.5, 2)
    state = SiteState("", 3, per_sample=case == "rows of other bits")
    layer = compressed(copy.deepcopy(exact), SavedTensors(FEW), state)
    if case == "strided weight":
        layer.weight = nn.Parameter(torch.rand(16)[::2])
    called, found = [], []
    prepared = batchnorm.gradients
    monkeypatch.setattr(batchnorm, "gradients", lambda *form: called.append(form) or prepared(*form))
    operator = batchnorm.backward
    monkeypatch.setattr(batchnorm, "backward", lambda *given: called.append(given) or operator(*given))
    for whole in (Groups.whole, lambda *_: None):
        monkeypatch.setattr(Groups, "whole", whole)
        torch.manual_seed(0)  # of the noise
        found.append(gradients(layer, x))

    assert len(called) == (case in IN_REGISTERS)
    for ours, decoded in zip(*found, strict=True):
        if decoded is None:
            assert ours is None
            continue
        assert (ours.dtype, ours.stride()) == (decoded.dtype, decoded.stride())
        near = 2**-7 if x.dtype == torch.bfloat16 else 1e-5  # decoded values are rounded to the type, too
        assert (ours - decoded).norm() <= near * decoded.norm()


def test_a_layer_without_parameters_has_the_gradient_of_one_with_ones():
    x = PLANES
    found = []
    for affine in (False, True):
        torch.manual_seed(0)
        found.append(gradients(keeping(nn.BatchNorm2d(8, affine=affine)), x)[0])

    assert torch.equal(*found)


def gradients(layer, x):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return x.grad, *(None if each is None else each.grad for each in (layer.weight, layer.bias))
