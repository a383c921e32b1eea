"""Schedule-free AdamW: the sequences of the paper, what parameters hold, and which weights are evaluated."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench import optim
from actbench.errors import ConversionError
from actbench.scheme.wrapped import evaluated_weights
from actbench.tools.train.evaluation import evaluated
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.processes import SINGLE_PROCESS
from actbench.tools.train.records import TrainingCase

LR, BETAS, EPS, DECAY = 0.1, (0.9, 0.99), 1e-8, 0.5


def reference(start: Tensor, gradients: list[Tensor], rates: list[float], *, decoupled: bool) -> tuple[Tensor, Tensor]:
    """Return y and x after steps, by the paper's algorithm with its three sequences in memory."""
    x = z = y = start
    second, total = torch.zeros_like(start), 0.0
    for step, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        gradient = gradient if decoupled else gradient + DECAY * y
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        rate = lr * (1 - BETAS[1] ** step) ** 0.5
        total += rate**2
        share = rate**2 / total if total else 0.0
        z = z - rate * (gradient / (second**0.5 + EPS) + (DECAY * y if decoupled else 0))
        x = (1 - share) * x + share * z
        y = (1 - BETAS[0]) * z + BETAS[0] * x
    return y, x


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_sequences_are_those_of_the_paper(decoupled: bool) -> None:
    random = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(4, 6, generator=random, dtype=torch.float64) for _ in range(7))
    rates = [0.0, 0.5 * LR, LR, LR, 0.3 * LR, LR]  # the first steps warm up
    weight = nn.Parameter(start.clone())
    optimizer = optim.ScheduleFreeAdamW([weight], decoupled=decoupled, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient.clone()
        optimizer.step()

    trained, averaged = reference(start, gradients, rates, decoupled=decoupled)

    torch.testing.assert_close(weight.detach(), trained)
    for _ in range(2):  # the second call does nothing
        optimizer.eval()
        torch.testing.assert_close(weight.detach(), averaged)
    for _ in range(2):
        optimizer.train()
        torch.testing.assert_close(weight.detach(), trained)
    assert not torch.allclose(trained, averaged)


def test_averaged_weights_are_not_stepped() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.ScheduleFreeAdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.eval()

    with pytest.raises(ConversionError, match="call train"):
        optimizer.step()


def test_a_first_beta_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        optim.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))], betas=(0.0, 0.999))
    optimizer = optim.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="above 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "betas": (0.0, 0.999)})


@pytest.mark.parametrize("again", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_decays_weights_as_the_first_does(again: Callable[[Any], Any]) -> None:
    optimizer = optim.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))], decoupled=False, weight_decay=DECAY)
    twin = again(optimizer)
    for each in (optimizer, twin):
        each.param_groups[0]["params"][0].grad = torch.full((3,), 0.1)
        each.step()
    weights, copied = (each.param_groups[0]["params"][0] for each in (optimizer, twin))

    assert torch.equal(weights, copied)


@pytest.mark.parametrize("training", [True, False])
def test_after_an_evaluation_weights_are_those_before(training: bool) -> None:
    optimizer = optim.ScheduleFreeAdamW([nn.Parameter(torch.ones(3))])
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in (1.0, -0.5, 0.3):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
    if not training:
        optimizer.eval()
    before = weight.detach().clone()
    with evaluated_weights(optimizer):
        inside = weight.detach().clone()

    torch.testing.assert_close(weight.detach(), before)
    assert torch.equal(inside, before) is not training
    assert optimizer.param_groups[0]["train_mode"] is training


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("scheme", ["schedule_free", "release+schedule_free", "ema+schedule_free"])
def test_a_run_evaluates_the_averaged_weights_and_trains_the_others(scheme: str) -> None:
    fields: dict[str, Any] = {"sequence_length": 16, "batch_size": 8, "steps": 6, "evaluate_every": 3}
    loop = TrainingLoop(
        TrainingCase(
            model="tiny-gpt2@vocab_size=28,n_embd=32,n_layer=1",
            data="text",
            scheme=scheme,
            optimizer="adamw",
            learning_rate=1e-2,
            **fields,
        )
    )
    losses = list(loop)
    optimizer: Any = loop._step.optimizer
    while not isinstance(optimizer, optim.ScheduleFreeAdamW):
        optimizer = optimizer.inner

    def loss() -> float:
        return evaluated(loop._setup.module, loop._feed.validation(), 6, "accuracy", SINGLE_PROCESS).loss

    trained = loss()
    optimizer.eval()
    averaged = loss()

    assert len(losses) == 6  # the evaluation between them left weights that can be stepped
    assert loop._evaluations[-1].loss == pytest.approx(averaged, rel=1e-6)
    assert trained != pytest.approx(averaged, rel=1e-4)
