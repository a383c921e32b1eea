"""Converted layers go to another process, as loaders and launchers send them."""

import copy
import io
import multiprocessing

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from actbench import schemes
from actbench.setup import TrainingSetup


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def gradient(module, x):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    return x.grad


def gradient_elsewhere(module, x):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(gradient, (module, x))


LAYERS = {
    "Hardsigmoid": (nn.Hardsigmoid, "fewbit:3"),
    "CompressedHardsigmoid": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid()), "actnn"),
    "Conv1D": (lambda: Conv1D(4, 4), "randomized:0.5"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, saved])
def test_a_copy_computes_the_same(name, copied):
    made, spec = LAYERS[name]
    module = schemes.build(spec).apply(TrainingSetup(nn.Sequential(made()))).module
    twin, x = copied(module), torch.randn(3, 4)

    assert [type(part) for part in twin.modules()] == [type(part) for part in module.modules()]
    assert torch.equal(gradient(twin, x), gradient(module, x))


@pytest.mark.slow
def test_another_process_computes_the_same():
    module = schemes.build("randomized:0.5").apply(TrainingSetup(nn.Sequential(Conv1D(4, 4)))).module
    x = torch.randn(3, 4)

    assert torch.equal(gradient_elsewhere(module, x), gradient(module, x))
