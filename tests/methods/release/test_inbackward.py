"""Parameters that are stepped within the backward pass: the bits of the optimizer inside, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from actbench import optim as ours
from actbench.errors import ConversionError

Make = Callable[[Any], optim.Optimizer]

MAKES: dict[str, Make] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2),
    "packed": lambda parameters: ours.AdamW(parameters, lr=1e-2),
}


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(32, 128), nn.Sequential(nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.embedding(tokens)))
        return scores


def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def losses(module: nn.Module, optimizer: optim.Optimizer, steps: int = 3, scheduled: bool = False) -> list[float]:
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduled else None
    found = []
    for step in range(steps):
        tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_updates_are_those_of_the_optimizer_inside_to_the_bit(name: str, scheduled: bool) -> None:
    plain, stepped = model(), model()

    exact = losses(plain, MAKES[name](plain.parameters()), scheduled=scheduled)
    found = losses(stepped, ours.StepInBackward(MAKES[name](stepped.parameters())), scheduled=scheduled)

    assert found == exact
    assert len(set(exact)) == len(exact)
    assert all(map(torch.equal, plain.parameters(), stepped.parameters()))


def test_no_gradient_is_left_and_none_but_one_is_there_when_its_parameter_is_stepped() -> None:
    module = model()
    inner = optim.SGD(module.parameters(), lr=1e-2)
    waiting: list[int] = []
    plain = inner.step
    inner.step = lambda *_: (  # type: ignore[method-assign,assignment]
        waiting.append(sum(p.grad is not None for p in module.parameters())),
        plain(),
    )
    optimizer = ours.StepInBackward(inner)

    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()

    assert waiting == [1] * len(list(module.parameters()))
    assert all(parameter.grad is None for parameter in module.parameters())
    optimizer.step()
    assert len(waiting) == len(list(module.parameters()))


def test_state_goes_to_the_plain_optimizer_and_back() -> None:
    whole, half = model(), model()
    losses(whole, optimizer := optim.AdamW(whole.parameters(), lr=1e-2))
    losses(half, stepping := ours.StepInBackward(optim.AdamW(half.parameters(), lr=1e-2)))
    saved = copy.deepcopy(stepping.state_dict())
    assert [sorted(state) for state in saved["state"].values()] == [["exp_avg", "exp_avg_sq", "step"]] * 3

    plain = optim.AdamW(half.parameters(), lr=1.0)
    plain.load_state_dict(saved)
    stepping.hold()
    assert losses(half, plain) == losses(whole, optimizer)

    again = ours.StepInBackward(optim.AdamW(half.parameters(), lr=1.0))
    again.load_state_dict(plain.state_dict())
    assert again.param_groups[0]["lr"] == 1e-2
    assert losses(half, again) == losses(whole, optimizer)


def test_a_frozen_parameter_that_is_thawed_is_stepped_by_step() -> None:
    module, plain = model(), model()
    module.body[0].weight.requires_grad_(False)
    optimizer = ours.StepInBackward(optim.SGD(module.parameters(), lr=1e-2))
    module.body[0].weight.requires_grad_(True)

    losses(module, optimizer)
    losses(plain, optim.SGD(plain.parameters(), lr=1e-2))

    assert all(map(torch.equal, plain.parameters(), module.parameters()))


def test_held_gradients_wait_for_the_step() -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())
    optimizer = ours.StepInBackward(optim.SGD(module.parameters(), lr=1e-2))

    optimizer.hold()
    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()

    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    optimizer.step()
    assert not torch.equal(module.head.weight, before["head.weight"])


def test_an_optimizer_that_is_gone_steps_nothing() -> None:
    module = model()
    ours.StepInBackward(optim.SGD(module.parameters(), lr=1e-2))

    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()

    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    module = model()
    optimizer = ours.StepInBackward(optim.SGD(module.parameters(), lr=1e-2))
    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()

    with pytest.raises(ConversionError, match="again after it was stepped"):
        module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    optimizer.zero_grad()
    module(torch.zeros(2, 3, dtype=torch.long)).sum().backward()


def test_a_block_that_reentrant_checkpointing_runs_twice_is_refused() -> None:
    """Each of its backward passes hands over a part of the gradient, and nothing says that more is to come."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    optimizer = ours.StepInBackward(optim.SGD(layer.parameters(), lr=1e-2))

    def twice(reentrant: bool) -> Tensor:
        once: Tensor = checkpoint(layer, x, use_reentrant=reentrant)
        again: Tensor = checkpoint(layer, once, use_reentrant=reentrant)
        return again.sum()

    with pytest.raises(ConversionError, match="re-entrant checkpointing"):
        twice(True).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    twice(False).backward()  # type: ignore[no-untyped-call]


def test_gradient_scalers_are_refused() -> None:
    module = model()
    optimizer = ours.StepInBackward(optim.SGD(module.parameters(), lr=1e-2))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.zeros(2, 3, dtype=torch.long)).sum()).backward()

    with pytest.raises(ConversionError, match="GradScaler"):
        scaler.step(optimizer)


class Own(optim.SGD):
    """One of somebody's own, of which nothing is known."""


@pytest.mark.parametrize("make", [optim.LBFGS, Own])
def test_optimizers_that_may_need_all_gradients_at_once_are_refused(make: Make) -> None:
    with pytest.raises(ConversionError, match="all at once"):
        ours.StepInBackward(make(model().parameters()))


def test_hooks_of_a_whole_step_are_refused() -> None:
    inner = optim.SGD(model().parameters(), lr=1e-2)
    inner.register_step_post_hook(lambda *_: None)

    with pytest.raises(ConversionError, match="once a step"):
        ours.StepInBackward(inner)
