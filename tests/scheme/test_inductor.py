"""Convolutional networks under inductor, which lays out what convolutions give as it likes."""

import copy
import itertools

import pytest
import torch
import torchvision
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import actbench


class Residual(nn.Module):
    """Two convolutions with batch norm and a way around them."""

    def __init__(self, inplace):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.ReLU(inplace)

    def forward(self, x):
        return self.last(self.second(self.first(x)) + x)


def plain(*activations):
    channels = itertools.pairwise([3, *(8, 12, 1, 6)[: len(activations)]])
    layers = [
        (nn.Conv2d(before, after, 3, 1 + index % 2, 1), activation)
        for index, ((before, after), activation) in enumerate(zip(channels, activations, strict=True))
    ]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def residual(inplace):
    stem = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace), nn.MaxPool2d(2)
    return nn.Sequential(*stem, Residual(inplace), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))


NETS = {
    "relu and silu": lambda: plain(nn.ReLU(), nn.SiLU()),
    "smooth": lambda: plain(nn.GELU(), nn.SiLU(), nn.GELU(approximate="tanh"), nn.Hardswish()),
    "in place": lambda: plain(nn.ReLU(True), nn.SiLU(True), nn.LeakyReLU(0.1, True), nn.ELU(inplace=True)),
    "residual": lambda: residual(False),
    "residual in place": lambda: residual(True),
}


def compare(model, x, tolerance):
    """Compare the outputs and all gradients of a model with those of a copy that is compiled whole by inductor."""
    torch.compiler.reset()
    outcomes = []
    for run in (model, torch.compile(copy.deepcopy(model), fullgraph=True)):
        leaf = x.detach().clone().requires_grad_()
        with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):  # it knows no fakes
            y = run(leaf)
            y.backward(torch.linspace(-1, 2, y.numel()).view_as(y))
        outcomes.append([y.detach(), leaf.grad, *(parameter.grad for parameter in run.parameters())])
    for eager, compiled in zip(*outcomes, strict=True):
        assert (eager - compiled).norm() <= tolerance * eager.norm()


def converted(name, spec, layout):
    torch.manual_seed(0)
    model, x = NETS[name]().to(memory_format=layout), torch.randn(4, 3, 18, 31)
    return actbench.convert(model, spec), x.contiguous(memory_format=layout)


@pytest.mark.slow
def test_convolutions_with_activations():
    compare(*converted("relu and silu", "fewbit:2", torch.contiguous_format), tolerance=1e-4)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize(
    ("name", "spec", "layout"),
    [
        ("relu and silu", "resilu2", torch.channels_last),
        ("smooth", "fewbit:3", torch.contiguous_format),
        ("smooth", "fewbit:3", torch.channels_last),
        ("smooth", "invact", torch.contiguous_format),
        ("smooth", "invact", torch.channels_last),
        ("in place", "fewbit:3", torch.channels_last),
        ("in place", "invact", torch.contiguous_format),
        ("residual", "fewbit:3", torch.channels_last),
        ("residual in place", "fewbit:3", torch.contiguous_format),
    ],
    ids=str,
)
def test_networks_and_schemes(name, spec, layout):
    compare(*converted(name, spec, layout), tolerance=1e-4)


@pytest.mark.exhaustive
@pytest.mark.newer_torch("its inductor is 1.4 % off without any scheme")
def test_resnet18():
    torch.manual_seed(0)
    model = actbench.convert(torchvision.models.resnet18(num_classes=10), "fewbit:3")
    compare(model, torch.randn(2, 3, 64, 96), tolerance=1e-3)
