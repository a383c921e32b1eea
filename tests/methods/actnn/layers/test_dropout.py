from functools import partial

import pytest
import torch
from torch.nn import functional as F

from actbench.methods.actnn.layers import dropout as coded, savedinput
from actbench.methods.actnn.layers.dropout import FusedDropout
from actbench.simulator import profiles
from actbench.simulator.card import place, simulated
from actbench.simulator.fake import fake_mode

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
KINDS = {"dropout": (3, 5, 7), "dropout1d": (3, 5, 7), "dropout2d": (3, 5, 4, 3), "dropout3d": (3, 5, 4, 3, 2)}


def bits(t):
    """Return what tells -0.0 from 0.0, and the same for every NaN."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return torch.where(t.isnan(), 1, t.detach().contiguous().view(words))


def run(function, x, grad, *args):
    torch.manual_seed(1)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf * 1, *args)
    state = torch.cuda.get_rng_state() if x.is_cuda else torch.get_rng_state()
    return y, torch.autograd.grad(y, leaf, grad)[0], state


def ours(name):
    return coded.dropout if name == "dropout" else partial(coded.channel_dropout, int(name[-2]))


def check(name, x, *args):
    torch.manual_seed(0)
    grad = torch.randn(x.shape).to(x)
    if grad.numel():
        grad.view(-1)[::5], grad.view(-1)[1::5], grad.view(-1)[2::5] = float("inf"), float("nan"), -0.0
    found, expected = (run(function, x, grad, *args) for function in (ours(name), getattr(F, name)))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[:2], expected[:2], strict=True))
    assert torch.equal(found[2], expected[2])
    assert found[0].stride() == expected[0].stride()


def kept_bytes(function, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(x)
    return sum(t.nbytes for t in kept)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_output_gradient_and_random_numbers_are_torchs(name, dtype, inplace):
    x = torch.randn(KINDS[name]).to(dtype)
    for p in (0.0, 0.1, 0.5, 1.0):
        check(name, x, p, True, inplace)
    check(name, x, 0.5, False, inplace)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (9,), (2, 3, 5)])
def test_awkward_shapes(shape):
    check("dropout", torch.randn(shape), 0.3)


def test_backward_works_in_pieces(monkeypatch):
    monkeypatch.setattr(savedinput, "PIECE", 16)
    check("dropout", torch.randn(7, 11), 0.3)


@pytest.mark.parametrize("count", [1, 9, 1000])
def test_one_bit_an_element_is_kept(count):
    x = torch.randn(count, requires_grad=True)
    assert kept_bytes(coded.dropout, x) == -(-count // 8)
    assert kept_bytes(lambda t: coded.dropout(t, 0.0), x) == 0
    assert kept_bytes(lambda t: coded.dropout(t, training=False), x) == 0
    assert kept_bytes(coded.dropout, x.detach()) == 0


def test_one_bit_a_channel_is_kept():
    x = torch.randn(3, 5, 8, 8, requires_grad=True)
    assert kept_bytes(partial(coded.channel_dropout, 2), x) == 2  # of 15 channels


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_wrong_probability_is_torchs_error(p):
    with pytest.raises(ValueError, match="between 0 and 1"):
        coded.dropout(torch.randn(4, requires_grad=True), p)


def test_cudas_operator_and_its_gradient_by_its_own_backward():
    x = torch.randn(6, 5, requires_grad=True)
    grad = torch.randn(6, 5)
    grad[0] = float("inf")
    torch.manual_seed(0)
    y = FusedDropout.apply(x, 0.25)
    torch.manual_seed(0)
    expected, mask = torch.ops.aten.native_dropout(x.detach(), 0.25, True)
    (gradient,) = torch.autograd.grad(y, x, grad)

    assert torch.equal(y, expected)
    assert torch.equal(bits(gradient), bits(torch.ops.aten.native_dropout_backward(grad, mask, 1 / 0.75)))


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["t4", "cpu"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_simulated_device_runs_its_own_operators(device, inplace):
    profile = profiles.get(device)
    names = {}
    for functions in (coded, F):
        with simulated(profile), fake_mode(), Seen() as seen:
            x = torch.empty(8, 8, requires_grad=True, device=place()) * 1
            functions.dropout(x, 0.5, True, inplace).sum().backward()
        names[functions] = {name for name in seen.names if name in ("native_dropout", "bernoulli_")}
    assert names[coded] == names[F] == {"native_dropout" if device == "t4" and not inplace else "bernoulli_"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_on_cuda(name, inplace):
    for dtype in DTYPES:
        check(name, torch.randn(KINDS[name]).to("cuda", dtype), 0.3, True, inplace)
