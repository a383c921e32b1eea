"""Weights and optimizer state that are made what a format leaves of them."""

import torch
from torch import nn, optim

from actbench.methods.formats import encodings
from actbench.methods.formats.encoded import RoundedState, RoundedWeights

INT3 = encodings.build("int:3,group_size=32")


def stepped(hook, make=lambda p: optim.AdamW(p, lr=0.1)):
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    nn.init.normal_(model[1].weight)
    model[2].requires_grad_(False)
    idle = nn.Parameter(torch.randn(32, 32))
    optimizer = make([*model.parameters(), idle])
    optimizer.register_step_post_hook(hook)
    before = idle.detach().clone(), model[2].weight.detach().clone()
    model(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    assert torch.equal(idle, before[0])
    assert torch.equal(model[2].weight, before[1])
    return model, optimizer


def levels(x):
    return max(len(row.unique()) for row in x.detach().reshape(-1, 32))


def test_weights_have_the_values_of_the_format_and_norms_stay_whole():
    model, _ = stepped(RoundedWeights(INT3))

    assert levels(model[0].weight) <= 2**3
    assert levels(model[1].weight) > 2**3
    assert levels(model[0].bias) > 2**3


def test_states_of_both_kinds_are_rounded_and_squares_stay_positive():
    simulated = encodings.build("smaq_simulated,main_bits=3,outlier_bits=3")
    model, optimizer = stepped(RoundedState(simulated))
    state = optimizer.state[model[0].weight]

    assert len(state["exp_avg"].unique()) < 32
    assert (state["exp_avg_sq"] >= 0).all()
    assert (state["exp_avg_sq"] == 0).any()  # which is why training with a linear second moment diverges
    assert state["step"] == 1

    model, optimizer = stepped(RoundedState(INT3), lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    assert levels(optimizer.state[model[0].weight]["momentum_buffer"]) <= 2**3
