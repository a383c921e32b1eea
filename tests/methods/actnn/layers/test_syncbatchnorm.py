"""SyncBatchNorm's math on a CPU, where torch has no kernels for its four operators: they are written out here."""

import copy
import functools

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.modules._functions import SyncBatchNorm as Exact

from actbench.methods.actnn.groupquantization import GroupQuantization
from actbench.methods.actnn.layers.batchnorm import SyncBatchNormalization
from actbench.methods.actnn.layers.layers import compressed
from actbench.packing import SavedTensors, SiteState

EPS, MOMENTUM = 1e-5, 0.3


def over(values, x):
    return values.view(-1, *[1] * (x.dim() - 2))


def others(x):
    return [dim for dim in range(x.dim()) if dim != 1]


def batch_norm_stats(x, eps):
    return x.mean(others(x)), (x.var(others(x), correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    share = (counts / counts.sum()).view(-1, 1)
    whole = (share * mean).sum(0)
    var = (share * (invstd.pow(-2) - eps + mean.square())).sum(0) - whole.square()
    running_mean.lerp_(whole, momentum)
    running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return whole, (var + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    return (x - over(mean, x)) * over(invstd * weight, x) + over(bias, x)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, for_x, for_weight, for_bias):
    sum_dy, product = grad.sum(others(grad)), (grad * (x - over(mean, x))).sum(others(grad))
    return sum_dy, product, product * invstd, sum_dy


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    inclination = invstd.square() * sum_dy_xmu / count.sum()
    inner = grad - over(sum_dy / count.sum(), x) - (x - over(mean, x)) * over(inclination, x)
    return inner * over(invstd * weight, x)


OPERATORS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


def compare(rank, size, store, chunk, patch):
    """Compare with torch's function in a process of a group, each with a batch of another size."""
    for operator in OPERATORS:
        patch(torch, operator.__name__, operator)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        torch.manual_seed(rank)
        x = (rank + torch.randn(3 + 2 * rank, 4, 6, 5, dtype=torch.double)).requires_grad_()
        weight, bias = (torch.rand(4, dtype=torch.double, requires_grad=True) for _ in range(2))
        running = torch.zeros(4).double(), torch.ones(4).double()
        group = distributed.group.WORLD
        packer = SavedTensors(GroupQuantization())
        packer.exclude.add([x])
        expected = Exact.apply(x, weight, bias, *running, EPS, MOMENTUM, group, size)
        layer = compressed(nn.SyncBatchNorm(4, EPS, MOMENTUM).double(), packer, SiteState("", 8, chunk=chunk))
        found = SyncBatchNormalization.apply(x, weight, bias, layer, group)
        grad = torch.randn_like(x)
        gradients = [torch.autograd.grad(y, (x, weight, bias), grad) for y in (found, expected)]

        assert torch.equal(found, expected)
        assert all(torch.equal(*each) for each in zip(running, layer.running(), strict=True))
        torch.testing.assert_close(*gradients)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("chunk", [1, 3])
def test_one_process_computes_what_torch_computes(tmp_path, monkeypatch, chunk):
    compare(0, 1, tmp_path / "store", chunk, functools.partial(monkeypatch.setattr, raising=False))


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("chunk", [1, 3])
def test_two_processes_compute_what_torch_computes(tmp_path, chunk):
    multiprocessing.spawn(compare, (2, tmp_path / "store", chunk, setattr), nprocs=2)


def test_a_group_of_processes_is_refused_on_a_cpu_as_by_torch(tmp_path):
    exact = nn.SyncBatchNorm(4)
    layer = compressed(copy.deepcopy(exact), SavedTensors(GroupQuantization()), SiteState("", 8))
    x = torch.randn(3, 4, 5, requires_grad=True)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for each in (exact, layer):
            with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
                each(x)
        assert torch.equal(layer.eval()(x), exact.eval()(x))
    finally:
        distributed.destroy_process_group()
    assert layer.num_batches_tracked == exact.num_batches_tracked
