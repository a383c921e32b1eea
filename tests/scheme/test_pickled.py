"""Converted layers go to another process, as loaders and launchers send them."""

import copy
import io
import multiprocessing

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from actbench import scheme as schemes
from actbench.scheme.base import OF_PARTS
from actbench.scheme.setup import TrainingSetup


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
    "CompressedConv1D": (lambda: nn.Sequential(Conv1D(4, 4), Conv1D(4, 4)), "dropit"),
    "LayerNormFromOutput": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), "msln"),
    "LlamaRMSNormFromOutput": (lambda: nn.Sequential(LlamaRMSNorm(4), nn.Linear(4, 4)), "msln"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, saved])
def test_a_copy_computes_the_same(name, copied):
    made, spec = LAYERS[name]
    module = schemes.build(spec).apply(TrainingSetup(nn.Sequential(made()))).module
    twin, x = copied(module), torch.randn(3, 4)

    assert [type(part) for part in twin.modules()] == [type(part) for part in module.modules()]
    assert torch.equal(gradient(twin, x), gradient(module, x))


def model():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=8, activation_function="silu")
    return nn.ModuleDict(
        {
            "lm": GPT2LMHeadModel(config),
            "conv": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.RMSNorm(6)),
        }
    )


def both_gradients(module):
    torch.manual_seed(0)
    module.train().zero_grad()
    ids = torch.arange(16).view(2, 8)
    images = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    (module["lm"](input_ids=ids, labels=ids).loss + module["conv"](images).relu().square().sum()).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


OF_MODULES = [name for name in schemes.alone() if set(schemes.lookup(name).model_construct().changes) & OF_PARTS]
SPECS = [{"fewbit": "fewbit:3", "randomized": "randomized:0.5", "encode": "encode:int:6"}.get(n, n) for n in OF_MODULES]


@pytest.mark.sampled(fast=10, slow=10)
@pytest.mark.parametrize(
    "spec", [*SPECS, "chunked_loss,head=lm.lm_head", "actnn:L3", "gact:L1+checkpoint", "offload+selective"]
)
def test_every_converted_model_can_be_saved(spec):
    spec = {"smaq": "smaq,on=activations", "encode:int:6": "encode:int:6,on=activations"}.get(spec, spec)
    module = schemes.build(spec).apply(TrainingSetup(model())).module
    twin = saved(module)

    torch.testing.assert_close(both_gradients(twin), both_gradients(module))


@pytest.mark.exhaustive
def test_another_process_computes_the_same():
    module = schemes.build("randomized:0.5").apply(TrainingSetup(nn.Sequential(Conv1D(4, 4)))).module
    x = torch.randn(3, 4)

    assert torch.equal(gradient_elsewhere(module, x), gradient(module, x))
