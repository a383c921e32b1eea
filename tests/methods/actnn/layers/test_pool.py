from functools import partial

import pytest
import torch
from torch.nn import functional as F

from actbench.methods.actnn.layers import pool, savedinput
from actbench.simulator.fake import fake_mode

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# kernel, stride, padding, dilation, ceil_mode
WINDOWS = [
    (2, None, 0, 1, False),
    (3, 2, 1, 1, True),
    (3, 1, 0, 2, True),
    (1, 2, 0, 1, False),
    (5, 3, 2, 1, True),
    ((2, 3), (1, 2), (1, 0), (2, 1), True),
]
PLANES = {1: (3, 5, 13), 2: (3, 5, 9, 8), 3: (3, 2, 9, 8, 7)}


def run(function, x, *args):
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf * 1, *args)
    torch.manual_seed(1)
    return y, torch.autograd.grad(y, leaf, torch.randn_like(y))[0]


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def ours(name):
    return partial(getattr(pool, name[:-2]), int(name[-2]))


def check(name, x, *args):
    found, expected = (run(function, x, *args) for function in (ours(name), getattr(F, name)))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def ties(shape, dtype=torch.float32):
    """Return few different values, so that windows hold the greatest more than once, and some that are no numbers."""
    torch.manual_seed(0)
    x = torch.randint(-2, 3, shape).to(dtype)
    x[0, 0, :4], x[-1, -1] = float("nan"), float("-inf")
    return x


def kept_bytes(function, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(x)
    return sum(t.nbytes for t in kept)


@pytest.mark.parametrize("dims", PLANES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_and_gradient_are_torchs_for_every_type(dims, dtype):
    check(f"max_pool{dims}d", ties(PLANES[dims], dtype), 3, 2, 1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dims", PLANES)
def test_maxima_and_gradient_are_torchs_for_every_window(dims, window):
    if isinstance(window[0], tuple) and dims != 2:
        window = (window[0][:1] * dims, *window[1:2], 0, 1, True)
        window = (window[0], window[0], *window[2:])
    check(f"max_pool{dims}d", ties(PLANES[dims]), *window)


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (3, 8, 8), (0, 3, 8, 8), (2, 1, 6, 1), (1, 3, 3, 3)])
def test_awkward_shapes(shape):
    check("max_pool2d", torch.randn(shape), 3, 2, 1)


def test_the_rows_of_a_transposed_batch():
    check("max_pool2d", torch.randn(8, 9, 5, 3).permute(3, 2, 1, 0), 2)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_backward_works_in_pieces(monkeypatch, memory):
    monkeypatch.setattr(savedinput, "PIECE", 1)
    check("max_pool2d", torch.randn(19, 3, 6, 4).to(memory_format=memory), 2, 1)  # 45 maxima a row


@pytest.mark.parametrize(
    ("kernel", "bits"), [(1, 1), (2, 2), (3, 4), ((1, 3), 2), ((3, 5), 4), ((16, 16), 8), ((1, 2), 1)]
)
def test_a_place_in_the_window_is_kept(kernel, bits):
    x = torch.randn(3, 5, 17, 19, requires_grad=True)
    maxima = F.max_pool2d(x, kernel).numel()
    assert kept_bytes(lambda t: pool.max_pool(2, t, kernel), x) == -(-maxima * bits // 8)
    assert kept_bytes(lambda t: pool.max_pool(2, t, kernel), x.detach()) == 0


def test_a_window_without_a_code_is_left_to_torch():
    x = torch.randn(1, 1, 20, 20)
    check("max_pool2d", x, (16, 17))
    check("max_pool2d", torch.randn(2, 1, 1, 9), (1, 2), 1, 0, (2, 2))
    y, indices = pool.max_pool(2, x.requires_grad_(), 2, return_indices=True)
    assert torch.equal(y, F.max_pool2d(x, 2))
    assert indices.dtype == torch.int64


def test_the_gradient_is_bit_for_bit_that_of_a_large_plane():
    check("max_pool2d", torch.randn(2, 2, 130, 257), 3, 2, 1)


@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("dims", PLANES)
def test_averages_and_gradient_are_torchs(dims, count_include_pad):
    check(f"avg_pool{dims}d", torch.randn(PLANES[dims]), 3, 2, 1, True, count_include_pad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_averages_of_every_type(dtype):
    x = torch.randn(3, 5, 9, 8).to(dtype)
    check("avg_pool2d", x, 3, None, 0, False, True, 5)
    check("adaptive_avg_pool2d", x, (4, 3))


@pytest.mark.parametrize("dims", PLANES)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_averages_to_a_size(dims, size):
    check(f"adaptive_avg_pool{dims}d", torch.randn(PLANES[dims]), size)


@pytest.mark.parametrize("size", [(4, 3), (None, 2), [1, 5]])
def test_averages_to_a_size_in_channels_last(size):
    check("adaptive_avg_pool2d", torch.randn(3, 5, 9, 8).to(memory_format=torch.channels_last), size)


@pytest.mark.parametrize(
    "name", [name for dims in PLANES for name in (f"avg_pool{dims}d", f"adaptive_avg_pool{dims}d")]
)
def test_averages_keep_nothing(name):
    x = torch.randn(PLANES[int(name[-2])], requires_grad=True)
    assert ours(name)(x, 2).requires_grad
    assert kept_bytes(lambda t: ours(name)(t, 2), x) == 0


@pytest.mark.parametrize("name", ["max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "max_pool2d"])
def test_autocast_widens_what_torch_widens(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(name, torch.randn(2, 3, 4, 4, 4)[:, :, 0] if "2d" in name else torch.randn(2, 3, 4, 4, 4).bfloat16(), 2)


@pytest.mark.parametrize("function", [pool.max_pool, pool.avg_pool, pool.adaptive_avg_pool])
def test_on_fake_tensors(function):
    with fake_mode():
        x = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        function(2, x, 2).sum().backward()
        assert x.grad.stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dims", PLANES)
def test_on_cuda(dims):
    torch.use_deterministic_algorithms(False)
    check(f"max_pool{dims}d", ties(PLANES[dims]).cuda(), 3, 3)
    check(f"avg_pool{dims}d", torch.randn(PLANES[dims]).cuda(), 3, 3)
    # into cells of one size: into others torch's gradient is added up in no certain order
    check(f"adaptive_avg_pool{dims}d", torch.randn(2, 3, *(6, 9, 12)[:dims]).cuda(), 3)
