"""The chunked loss beside what others do with gradients: hooks, functions of their own, checkpoints, scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from actbench import scheme as schemes
from actbench.errors import ConversionError
from actbench.scheme.setup import TrainingSetup

CLASSES = 50


class Model(nn.Module):
    """A language model of two layers, whose loss is given."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle = nn.Embedding(CLASSES, 24), nn.Linear(24, 24)
        self.head, self.loss = nn.Linear(24, CLASSES, bias=bias), loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.middle(self.embed(ids))))
        return self.loss(logits, labels)


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def batch(rows: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (rows, length), generator=random)
    labels[0, 2:5] = -100
    return torch.randint(CLASSES, (rows, length), generator=random), labels


def result(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = model(*batch())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def in_pieces(exact: nn.Module, pieces: int = 4) -> nn.Module:
    spec = f"chunked_loss:{pieces},head=head"
    return schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module


def test_a_frozen_head_gets_no_gradient_and_the_layers_before_it_do() -> None:
    exact = Model(plain)
    exact.head.requires_grad_(False)

    (_, gradients), (_, others) = result(exact), result(in_pieces(exact))

    assert len(gradients) == len(others) == 3
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient)


def test_backward_runs_twice_where_the_graph_is_kept_and_second_derivatives_are_refused() -> None:
    model = in_pieces(Model(plain))
    loss = model(*batch())
    loss.backward(retain_graph=True)
    once = model.head.weight.grad.clone()  # type: ignore[union-attr, operator]
    loss.backward()

    torch.testing.assert_close(model.head.weight.grad, 2 * once)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(model(*batch()), list(model.parameters()), create_graph=True)


class Twice(torch.autograd.Function):
    """A function of a user's own, past which no function of torch leads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def by_own_function(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(Twice.apply(logits), labels)  # type: ignore[arg-type]


def recomputed(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(checkpoint(lambda x: x * 1.5, logits, use_reentrant=True), labels)


@pytest.mark.parametrize("loss", [by_own_function, recomputed])
def test_gradients_are_right_where_autograd_is_passed_by(loss: Any) -> None:
    exact = Model(loss)

    (_, gradients), (_, others) = result(exact), result(in_pieces(exact))

    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_backward_hooks_of_modules_leave_the_gradients_as_they_are() -> None:
    exact = Model(lambda logits, labels: logits)
    exact.head.weight.requires_grad_(False)
    model = in_pieces(exact)
    for each in (exact, model):
        each.register_full_backward_hook(lambda *_: None)

    def gradients(module: nn.Module) -> list[Tensor]:
        ids, labels = batch()
        plain(module(ids, labels), labels).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    for gradient, other in zip(gradients(exact), gradients(model), strict=True):
        torch.testing.assert_close(other, gradient)


def test_a_learned_scale_gets_its_gradient() -> None:
    scale = nn.Parameter(torch.tensor(1.5))
    exact = Model(lambda logits, labels: plain(logits * scale, labels))
    result(exact)
    wanted, scale.grad = scale.grad, None

    result(in_pieces(exact, pieces=2))

    torch.testing.assert_close(scale.grad, wanted)


def test_logits_that_are_read_after_the_optimizers_step_are_refused() -> None:
    model = in_pieces(Model(lambda logits, labels: logits))
    ids, labels = batch()
    logits = model(ids, labels)
    plain(logits, labels).backward()

    torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(ConversionError, match="read them before the optimizer's step"):
        logits.argmax(-1)


def test_hooks_that_pack_do_not_bias_it() -> None:
    """Of the sharpened softmax, whose second computation from noise would: relative error of the mean of 60 draws."""

    def sharp(logits: Tensor, labels: Tensor) -> Tensor:
        return plain(logits * 8.0, labels)

    exact = Model(sharp)
    truth = torch.cat([gradient.flatten() for gradient in result(exact)[1]])

    def error(spec: str) -> float:
        model = schemes.build(spec).apply(TrainingSetup(copy.deepcopy(exact))).module
        draws = [torch.cat([gradient.flatten() for gradient in result(model)[1]]) for _ in range(60)]
        return float((torch.stack(draws).mean(0) - truth).norm() / truth.norm())

    assert error("gact:L1.2+chunked_loss:4,head=head") < 1.2 * error("gact:L1.2")
