import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actbench.measuring.meters.trace import AllocationTrace
from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers import convolution
from actbench.methods.actnn.layers.geometry import Geometry
from actbench.methods.actnn.layers.layers import compressed
from actbench.packing import Identity, SavedTensors, SiteState

LAYERS = {
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (5, 4, 9, 8)),
    "same on one side": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same"), (5, 4, 9, 8)),
    "same, dilated": (lambda: nn.Conv1d(4, 6, 4, dilation=3, padding="same"), (5, 4, 19)),
    "valid": (lambda: nn.Conv1d(4, 6, 4, padding="valid"), (5, 4, 19)),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular"), (5, 4, 9, 8)),
    "reflect": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", padding_mode="reflect"), (5, 4, 9, 8)),
    "replicate": (lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"), (5, 4, 5, 4, 6)),
    "zeros": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), stride=(1, 2)), (5, 4, 9, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (5, 4, 9, 8)),
    "pointwise": (lambda: nn.Conv2d(4, 8, 1), (5, 4, 9, 8)),
    "no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "no batch, same": (lambda: nn.Conv2d(4, 6, 4, padding="same"), (4, 9, 8)),
    "no batch, transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), (4, 9)),
    "one image": (lambda: nn.Conv2d(4, 6, 3), (1, 4, 9, 8)),
}

FEW = GroupQuantization(32)


def pair(make, codec=FEW, chunk=1):
    torch.manual_seed(0)
    exact = make()
    return exact, compressed(copy.deepcopy(exact), SavedTensors(codec), SiteState("", 8, chunk=chunk))


def results(layer, x, *more):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x, *more)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_paddings_groups_and_single_images(make, shape, chunk):
    exact, layer = pair(make, chunk=chunk)
    x = torch.randn(shape)
    expected, found = results(exact, x), results(layer, x)

    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_all_gradients_are_torchs_where_the_input_is_kept_as_it_is(make, shape):
    exact, layer = pair(make, codec=Identity())
    x = torch.randn(shape)

    for one, other in zip(results(layer, x), results(exact, x), strict=True):
        assert torch.equal(one, other)


def test_a_transposed_convolution_takes_a_wanted_size():
    exact, layer = pair(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), codec=Identity())
    x = torch.randn(5, 4, 9, 8)

    for one, other in zip(results(layer, x, [20, 18]), results(exact, x, [20, 18]), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="requested an output size"):
        layer(x.requires_grad_(), [200, 18])


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 9, 8), (5, 3, 9, 8)])
def test_a_wrong_input_is_refused_as_by_torch(shape):
    exact, layer = pair(lambda: nn.Conv2d(4, 6, 3))
    errors = []
    for each in (exact, layer):
        with pytest.raises(RuntimeError) as caught:
            each(torch.randn(shape, requires_grad=True))
        errors.append(str(caught.value))

    assert errors[0] == errors[1]


def test_autocast_keeps_nothing_that_hides_a_shared_weight_from_autograd():
    """Autocast would remember a cast of the weight that was made inside of the autograd function."""
    _, layer = pair(lambda: nn.Conv2d(4, 4, 3, padding=1))
    x = torch.randn(2, 4, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        F.conv2d(x, layer.weight).sum().backward()

    assert layer.weight.grad is not None


@pytest.mark.parametrize("padding", [0, (2, 1), [1], "same", "valid"])
def test_a_geometry_computes_what_its_layer_computes(padding):
    x, layer = torch.randn(2, 4, 9, 8), nn.Conv2d(4, 6, 3, padding=padding, dilation=(2, 1), groups=2, bias=False)

    assert torch.equal(Geometry.of(layer).forward(x, layer.weight, None), layer(x))


@pytest.fixture(autouse=True, params=[0, convolution.AT_ONCE_BYTES], ids=["one by one", "at once"])
def at_once_bytes(request, monkeypatch):
    """Let all gradients of the small inputs here be computed at once, or one by one as those of large ones."""
    monkeypatch.setattr(convolution, "AT_ONCE_BYTES", request.param)
    return request.param


def test_the_decoded_input_is_gone_before_the_gradient_of_the_input_is_made(monkeypatch, at_once_bytes):
    _, layer = pair(lambda: nn.Conv2d(4, 6, 3))
    order = []
    backward, input_gradient = Geometry.backward, Geometry.input_gradient

    def noted(self, grad, x, weight, wanted):
        order.append((wanted, x.untyped_storage().nbytes()))
        return backward(self, grad, x, weight, wanted)

    def gradient(self, grad, size, *others):
        order.append(size)
        return input_gradient(self, grad, size, *others)

    monkeypatch.setattr(Geometry, "backward", noted)
    monkeypatch.setattr(Geometry, "input_gradient", gradient)
    x = torch.randn(5, 4, 9, 8)
    results(layer, x)

    small = [((True, True, True), x.nbytes)]
    assert order == (small if at_once_bytes else [((False, True, True), x.nbytes), x.shape])


def test_only_small_inputs_are_there_beside_their_gradient(monkeypatch, at_once_bytes):
    _, layer = pair(lambda: nn.Conv2d(4, 6, 3))
    masks = []
    backward = Geometry.backward
    monkeypatch.setattr(Geometry, "backward", lambda self, *given: masks.append(given[-1]) or backward(self, *given))
    results(layer, torch.randn(5, 4, 33, 32))  # 82 KiB

    assert masks == [(False, True, True)]


GEOMETRIES = {
    "plain": (lambda: nn.Conv2d(8, 16, 3, padding=1), (4, 8, 12, 11)),
    "strided": (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1), (4, 8, 12, 11)),
    "dilated": (lambda: nn.Conv2d(8, 16, 3, stride=3, dilation=2), (4, 8, 12, 14)),
    "grouped": (lambda: nn.Conv2d(8, 16, 3, groups=4, stride=2), (4, 8, 12, 11)),
    "odd": (lambda: nn.Conv2d(8, 16, 4, padding="same"), (4, 8, 12, 11)),
    "1d": (lambda: nn.Conv1d(8, 16, 5, stride=2), (4, 8, 40)),
    "3d": (lambda: nn.Conv3d(8, 16, 3, stride=(1, 2, 3), padding=1), (2, 8, 7, 6, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1), (4, 8, 12, 11)),
    "transposed-grouped": (lambda: nn.ConvTranspose2d(8, 16, 4, stride=2, groups=2, padding=1), (4, 8, 12, 11)),
}


def backward_peak(layer, x):
    layer.requires_grad_(False)
    output = layer(x.clone().requires_grad_() * 1)
    grad = torch.ones_like(output)
    with AllocationTrace() as trace:
        trace.mark("begin")
        output.backward(grad)
        trace.mark("end")
    return trace.peak_bytes("begin", "end")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_gradient_of_the_input_copies_no_input(geometry, layout):
    build, shape = GEOMETRIES[geometry]
    x = torch.randn(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=layout)
    exact, layer = pair(build)
    expected, found = backward_peak(exact, x), backward_peak(layer, x)
    copied = x.nbytes if "grouped" in geometry and not x.is_contiguous() else 0

    assert found <= expected + copied + 256
