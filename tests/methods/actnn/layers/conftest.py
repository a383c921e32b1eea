"""One of each layer that packs its input, and what is asked of it."""

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from actbench.methods.actnn.layers.layers import compressed
from actbench.packing import SiteState

LAYERS = {
    "conv1d": (lambda: nn.Conv1d(8, 6, 3, padding=1), (5, 8, 40)),
    "conv2d": (lambda: nn.Conv2d(8, 6, 3, stride=2, padding=1), (5, 8, 9, 8)),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4, dilation=2, bias=False), (5, 8, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (5, 4, 5, 4, 6)),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 6, 3, stride=2, output_padding=1), (5, 8, 40)),
    "transposed2d": (lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2), (5, 8, 9, 8)),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 3, padding=1), (5, 4, 5, 4, 6)),
    "linear": (lambda: nn.Linear(64, 6), (10, 64)),
    "linear3d": (lambda: nn.Linear(64, 6, bias=False), (5, 4, 64)),
    "transformers": (lambda: Conv1D(6, 64), (5, 4, 64)),
    "batchnorm1d": (lambda: nn.BatchNorm1d(64), (10, 64)),
    "batchnorm2d": (lambda: nn.BatchNorm2d(8), (5, 8, 9, 8)),
    "average": (lambda: nn.BatchNorm2d(8, momentum=None), (5, 8, 9, 8)),
    "evaluated": (lambda: nn.BatchNorm2d(8).eval(), (5, 8, 9, 8)),
    "untracked": (lambda: nn.BatchNorm3d(4, affine=False, track_running_stats=False), (5, 4, 5, 4, 6)),
    "sync": (lambda: nn.SyncBatchNorm(8), (5, 8, 9, 8)),
    "layernorm": (lambda: nn.LayerNorm((4, 64)), (5, 4, 64)),
    "biasless": (lambda: nn.LayerNorm(64, bias=False), (10, 64)),
    "groupnorm": (lambda: nn.GroupNorm(2, 8), (5, 8, 9, 8)),
}


@pytest.fixture(params=LAYERS)
def kind(request):
    """Name of a layer."""
    return request.param


@pytest.fixture
def pair():
    """Gives an exact layer and a compressed one with parameters of its own, and an input."""

    def make(kind, packer, bits=2, chunk=1):
        torch.manual_seed(0)
        layer, shape = LAYERS[kind]
        exact = layer()
        for each in [*exact.parameters(), *(b for b in exact.buffers() if b.is_floating_point())]:
            each.data += 0.1 * torch.rand_like(each)
        return (
            exact,
            compressed(copy.deepcopy(exact), packer, SiteState(kind, bits, chunk=chunk)),
            1 + torch.randn(shape),
        )

    return make


@pytest.fixture
def results():
    """Gives the output and all gradients, for a gradient of the output that is always the same."""

    def run(layer, x):
        layer.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    return run


@pytest.fixture
def saved_by():
    """Gives the storages that a forward saves, and its result."""

    def watch(run):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            result = run()
        return {t.untyped_storage() for t in found}, result

    return watch


@pytest.fixture
def own():
    """Gives the storages that a layer holds itself."""
    return lambda layer: {t.untyped_storage() for t in [*layer.parameters(), *layer.buffers()]}
