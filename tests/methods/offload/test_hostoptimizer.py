"""Optimizers whose state and step are in host memory; a CPU stands for a device here."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from actbench.methods.offload import hostoptimizer
from actbench.ops import hostmemory
from actbench.optim import HostOptimizer

KINDS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "groups": lambda parameters: optim.Adam([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]),
    "adafactor": lambda parameters: optim.Adafactor(parameters),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostoptimizer, "is_elsewhere", lambda tensor: True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def run(module: nn.Module, optimizer: optim.Optimizer, steps: int, seed: int = 1) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 6, generator=random)).square().sum().backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("device")
def test_it_steps_as_the_optimizer_does_to_the_bit(kind: str) -> None:
    exact, found = model(), model()
    plain, moved = KINDS[kind]([*exact.parameters()]), HostOptimizer(KINDS[kind]([*found.parameters()]))
    schedules = [optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (plain, moved)]
    for seed in range(3):
        run(exact, plain, 2, seed)
        run(found, moved, 2, seed)
        for schedule in schedules:
            schedule.step()

    assert same(exact, found)
    assert all(leaf.untyped_storage() in hostmemory.NOTED for state in moved.state.values() for leaf in state.values())
    assert all(parameter.untyped_storage() not in hostmemory.NOTED for parameter in found.parameters())


@pytest.mark.parametrize(("first", "second"), [(optim.AdamW, HostOptimizer), (HostOptimizer, optim.AdamW)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("device")
def test_a_run_goes_on_from_the_state_of_either(kind: str, first: type, second: type) -> None:
    def optimizer(module: nn.Module, cls: type) -> optim.Optimizer:
        found = KINDS[kind]([*module.parameters()])
        return HostOptimizer(found) if cls is HostOptimizer else found

    whole, resumed = model(), model()
    before, after = optimizer(whole, first), optimizer(resumed, second)
    run(whole, before, 2)
    resumed.load_state_dict(whole.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(whole, before, 2, seed=5)
    run(resumed, after, 2, seed=5)

    assert same(whole, resumed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("device")
def test_an_optimizer_that_was_stepped_goes_on(kind: str) -> None:
    exact, found = model(), model()
    plain, stepped = (KINDS[kind]([*module.parameters()]) for module in (exact, found))
    run(exact, plain, 2)
    run(found, stepped, 2)

    moved = HostOptimizer(stepped)
    assert moved.state.keys() == set(found.parameters())
    run(exact, plain, 2, seed=5)
    run(found, moved, 2, seed=5)

    assert same(exact, found)


@pytest.mark.usefixtures("device")
def test_weights_that_somebody_writes_are_stepped_as_they_are() -> None:
    exact, found = model(), model()
    plain, moved = KINDS["adamw"]([*exact.parameters()]), HostOptimizer(KINDS["adamw"]([*found.parameters()]))
    for module, optimizer in ((exact, plain), (found, moved)):
        run(module, optimizer, 2)
        module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
        run(module, optimizer, 2)

    assert same(exact, found)


@pytest.mark.usefixtures("device")
def test_parameters_without_gradient_and_groups_that_come_later() -> None:
    exact, found = model(), model()
    for module in (exact, found):
        module[0].requires_grad_(False)
    plain, moved = (optim.AdamW(module[2].parameters(), lr=0.1) for module in (exact, found))
    moved = HostOptimizer(moved)
    run(exact, plain, 1)
    run(found, moved, 1)
    for module, optimizer in ((exact, plain), (found, moved)):
        module[0].requires_grad_(True)
        optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
        run(module, optimizer, 2)

    assert same(exact, found)


def test_on_the_host_nothing_moves() -> None:
    found = model()
    moved = HostOptimizer(KINDS["adamw"]([*found.parameters()]))
    run(found, moved, 1)

    assert all(twin is parameter for parameter, twin in moved._twins.items())
    assert len(moved.state) == 4
    assert moved.step(lambda: 7) == 7


@pytest.mark.usefixtures("device")
def test_a_gradient_of_a_step_that_failed_is_not_stepped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nn.Linear(2, 1)
    moved = HostOptimizer(optim.SGD(found.parameters(), lr=1.0))
    found(torch.ones(2)).sum().backward()
    moved.state_dict()  # makes the copies of the parameters
    with monkeypatch.context() as patch:
        copies = iter((hostoptimizer.to_host,))
        patch.setattr(hostoptimizer, "to_host", lambda tensor: next(copies)(tensor))
        with pytest.raises(StopIteration):
            moved.step()

    before = found.weight.detach().clone()
    found.weight.grad, found.bias.grad = None, torch.ones(1)
    moved.step()
    found.weight.grad, found.bias.grad = torch.zeros(1, 2), None
    moved.step()

    assert torch.equal(found.weight, before)


@pytest.mark.usefixtures("device")
def test_state_that_is_taken_over_leaves_the_device_also_of_parameters_that_are_not_stepped() -> None:
    found = model()
    plain = KINDS["adamw"]([*found.parameters()])
    run(found, plain, 1)
    moved = HostOptimizer(plain)
    found[0].requires_grad_(False)
    run(found, moved, 1)

    assert len(moved.state) == 4
    assert all(leaf.untyped_storage() in hostmemory.NOTED for state in moved.state.values() for leaf in state.values())
