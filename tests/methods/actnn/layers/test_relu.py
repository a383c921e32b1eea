import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from actbench.methods.actnn.layers import relu
from actbench.simulator.fake import fake_mode

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
CALLS = {
    "relu": (),
    "leaky_relu": (0.1,),
    "relu6": (),
    "hardtanh": (-1.0, 2.0),
    "hardsigmoid": (),
    "hardshrink": (0.5,),
    "softshrink": (0.25,),
    "threshold": (0.1, 20.0),
}
OVERWRITING = [name for name in CALLS if not name.endswith("shrink")]


def run(function, x, grad, *args, **kwargs):
    leaf = x.clone().requires_grad_()
    y = function(leaf * 1, *args, **kwargs)
    return y, torch.autograd.grad(y, leaf, grad)[0]


def same(one, other):
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def kept_bytes(function, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(x)
    return sum(t.nbytes for t in kept)


def values(shape, dtype):
    torch.manual_seed(0)
    x = 3 * torch.randn(shape).to(dtype)
    special = torch.tensor([0.0, -0.0, 6.0, -3.0, 0.5, float("inf"), float("-inf")])
    x.view(-1)[: special.numel()] = special.to(dtype)[: x.numel()]
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradient_are_torchs_bit_for_bit(name, dtype):
    x = values((3, 5, 7, 3), dtype)
    grad = torch.randn(x.shape).to(dtype)
    grad[0, 0, 0], grad[0, 0, 1] = float("inf"), float("nan")
    (y, gradient), (expected, expected_gradient) = (
        run(getattr(place, name), x, grad, *CALLS[name]) for place in (relu, F)
    )

    assert same(y, expected)
    assert same(gradient, expected_gradient)


@pytest.mark.parametrize("name", OVERWRITING)
def test_the_input_is_overwritten_where_that_is_asked(name):
    x = values((3, 5, 7), torch.float32)
    y, gradient = run(getattr(relu, name), x, torch.ones(x.shape), *CALLS[name], inplace=True)
    expected, expected_gradient = run(getattr(F, name), x, torch.ones(x.shape), *CALLS[name])
    source = x.clone().requires_grad_() * 1
    assert getattr(relu, name)(source, *CALLS[name], inplace=True).data_ptr() == source.data_ptr()
    assert torch.equal(y, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("view", ["channels_last", "transposed", "with gaps"])
def test_relu_of_what_is_not_contiguous(view, inplace):
    x = torch.randn(4, 3, 6, 8)
    x = {"channels_last": x.to(memory_format=torch.channels_last), "transposed": x.mT, "with gaps": x[..., ::2]}[view]
    grad = torch.randn(x.shape)

    def on_view(function):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        start = leaf * 1 if view != "with gaps" else torch.cat([leaf, leaf], 3)[..., ::2]
        y = function(start, inplace=inplace)
        return y, torch.autograd.grad(y, leaf, grad[..., : y.shape[-1]])[0]

    (y, gradient), (expected, expected_gradient) = (on_view(place.relu) for place in (relu, F))
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_output_may_be_changed_in_place(memory):
    x = torch.randn(2, 3, 4, 5).to(memory_format=memory).requires_grad_()
    y = relu.relu(x)
    y += 1
    y.sum().backward()

    assert torch.equal(y, F.relu(x) + 1)
    assert torch.equal(x.grad, (x > 0).float())


@pytest.mark.parametrize("count", [0, 1, 9, 1000])
@pytest.mark.parametrize("name", CALLS)
def test_one_bit_an_element_is_kept(name, count):
    levels = 0 if name == "relu" else 2 * 4
    x = torch.randn(count, requires_grad=True)
    assert kept_bytes(lambda t: getattr(relu, name)(t, *CALLS[name]), x) == -(-count // 8) + levels


def test_the_numbers_beside_the_bits_are_the_same_tensor_in_every_call():
    x = torch.randn(4, requires_grad=True)
    outputs = [relu.leaky_relu(x) for _ in range(2)]
    first, second = (output.grad_fn.saved_tensors[1] for output in outputs)
    assert first.data_ptr() == second.data_ptr()


def test_a_leaf_may_not_be_overwritten_and_is_not():
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        relu.relu(x, inplace=True)
    assert x.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_on_fake_tensors_and_on_real_ones_afterwards(name):
    function = getattr(relu, name)
    with fake_mode():
        x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        y = function(x)
        y.sum().backward()
        assert x.grad.stride() == x.stride() == y.stride()
    real = torch.randn(8, requires_grad=True)
    function(real).sum().backward()
    assert torch.equal(real.grad > 0.5, real > 0)


def test_a_parameter_is_an_input_like_any_other():
    weight = nn.Parameter(torch.tensor([-1.0, 2.0]))
    relu.relu(weight).sum().backward()
    assert weight.grad.tolist() == [0.0, 1.0]


def test_slopes_that_change_leave_a_bounded_number_of_tables():
    x = torch.randn(64, requires_grad=True)
    for step in range(100):
        output = relu.leaky_relu(x, 0.1 + step / 1000)
        assert torch.equal(output, F.leaky_relu(x, 0.1 + step / 1000))
    assert 0 < len(relu._tables) <= 64
    assert not any(isinstance(table, FakeTensor) for table in relu._tables.values())
