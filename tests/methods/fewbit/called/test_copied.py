"""A model that was copied or moved has calls and tables of its own."""

import copy
import pickle

import pytest
import torch
from activationcalls import Block, convert, same, saved_and_gradient
from torch import nn

from actbench.packing.forwardwrapper import ReboundForward


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("spec", ["fewbit:3", "invact", "regelu2"])
def test_a_copy_has_calls_of_its_own(spec, copied):
    model = convert(nn.Sequential(Block(), Block()), spec)
    model(torch.randn(4, 8)).sum()  # layers are there now
    twin = copied(model)

    assert all(ReboundForward.of(a).module is a for a in twin)
    same(twin, model, torch.randn(4, 8))
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_a_moved_model_keeps_its_tables():
    model = convert(nn.Sequential(Block()))
    before = saved_and_gradient(model, torch.ones(4, 8))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)

    assert torch.equal(saved_and_gradient(model, torch.ones(4, 8))[1], before[1])
    half = model.half()
    assert half(torch.ones(4, 8).half().requires_grad_()).dtype == torch.float16
