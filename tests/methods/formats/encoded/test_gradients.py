"""Gradients that wait packed, and the optimizer that is given them one at a time."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn, optim

from actbench.errors import ConversionError
from actbench.methods.formats import encodings
from actbench.methods.formats.encoded import PackedGradients, StepByParameter, through

INT8 = encodings.build("int:8")  # to the nearest: no noise
OPTIMIZERS = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
}


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))


def groups(model):
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]


def packing(model, optimizer="sgd", encoding=INT8):
    packed = PackedGradients(model.parameters(), encoding)
    return StepByParameter(OPTIMIZERS[optimizer](groups(model)), packed)


def backward(model, x):
    model(x).square().sum().backward()


def test_a_gradient_is_taken_off_its_parameter_and_takes_the_bytes_of_the_format():
    model = network()
    optimizer = packing(model)
    backward(model, torch.randn(4, 64))

    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.bias", "2.bias"]  # small
    held = sum(part.nbytes for part in optimizer.gradient_parts())
    assert held == (64 * 32 + 4 * 64 * 32 // 64) + (32 * 8 + 4 * 32 * 8 // 64)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_the_optimizer_on_what_the_format_leaves_of_gradients(name):
    model = network()
    plain = copy.deepcopy(model)
    optimizer, other = packing(model, name), OPTIMIZERS[name](groups(plain))
    for _ in range(3):
        x = torch.randn(4, 64)
        backward(model, x)
        backward(plain, x)
        for parameter in plain.parameters():
            if parameter.numel() >= 64:
                parameter.grad = through(parameter.grad, INT8)
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()

    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]


def test_gradients_accumulate_and_stay_until_they_are_zeroed():
    model, x = network(), torch.randn(4, 64)
    exact = copy.deepcopy(model)
    optimizer = packing(model)
    backward(model, x)
    backward(model, x)
    backward(exact, x)
    found = optimizer.gradients()

    for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
        once = other.grad
        packs = parameter.numel() >= 64
        wanted = through(through(once, INT8) + once, INT8) if packs else 2 * once
        assert torch.equal(found[parameter], wanted)
    optimizer.step()
    assert len(optimizer.gradients()) == 4
    optimizer.zero_grad()
    assert not optimizer.gradients()
    assert not list(optimizer.gradient_parts())


def test_a_new_optimizer_begins_without_gradients():
    model = network()
    optimizer = packing(model)
    backward(model, torch.randn(4, 64))
    anew = StepByParameter(OPTIMIZERS["sgd"](groups(model)), optimizer.packed)

    assert not list(anew.gradient_parts())


def test_a_failing_step_leaves_groups_and_gradients_as_they_were(monkeypatch):
    model = network()
    optimizer = packing(model)
    backward(model, torch.randn(4, 64))

    steps = []

    def fail():
        steps.append([p for p in model.parameters() if p.grad is not None])
        if len(steps) > 1:
            raise ArithmeticError

    monkeypatch.setattr(optimizer.inner, "step", fail)
    with pytest.raises(ArithmeticError) as caught:
        optimizer.step()

    assert caught.traceback  # holds the frames: what is put back must not wait for their end
    assert [len(together) for together in steps] == [2, 1]  # both biases, and one weight alone
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert len(optimizer.gradients()) == 4


def test_an_optimizer_of_all_parameters_at_once_is_refused():
    model = network()
    with pytest.raises(ConversionError, match="gradients cannot wait packed for LBFGS"):
        StepByParameter(optim.LBFGS(model.parameters()), PackedGradients(model.parameters(), INT8))


def test_schedulers_closures_and_saved_states_work():
    model = network()
    optimizer = packing(model, "adamw")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    schedule.step()
    second = optimizer.step(closure)
    assert second != first
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.005, 0.025]

    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    other = packing(twin, "adamw")
    other.load_state_dict(state)
    for parameter, its_twin in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], other.state[its_twin]["exp_avg"])
    backward(model, torch.ones(4, 64))
    optimizer.zero_grad()
    backward(model, torch.ones(4, 64))
    backward(twin, torch.ones(4, 64))
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_model_is_freed_with_its_gradients():
    model = network()
    optimizer = packing(model)
    backward(model, torch.randn(4, 64))
    alive = [weakref.ref(part) for part in optimizer.gradient_parts()] + [weakref.ref(model)]
    assert len(alive) == 5
    del model, optimizer
    gc.collect()

    assert not any(reference() is not None for reference in alive)


def test_a_scaler_that_would_find_nothing_to_unscale_is_refused():
    model = network()
    optimizer, scaler = packing(model), torch.amp.GradScaler("cpu")
    before = model[0].weight.detach().clone()
    scaler.scale(model(torch.randn(4, 64)).square().sum()).backward()
    with pytest.raises(ConversionError, match="GradScaler cannot unscale gradients"):
        scaler.step(optimizer)
    assert torch.equal(model[0].weight, before)

    model = network()
    optimizer = packing(model)
    before = model[0].weight.detach().clone()
    backward(model, torch.randn(4, 64))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not torch.equal(model[0].weight, before)
