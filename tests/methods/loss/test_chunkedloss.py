"""Cross entropy in pieces, beside torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from languagemodels import CLASSES, Model, batch, in_pieces, plain, result
from torch import Tensor, nn
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import ConversionError, NothingToConvertError, SpecError
from actbench.methods.loss.deferredlogits import Logits
from actbench.scheme.setup import TrainingSetup


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].reshape(-1))


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((torch.tanh(logits / 2.0) * 2.0).reshape(-1, CLASSES), labels.reshape(-1))


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.where(labels >= 0, 3).view(-1)
    return F.cross_entropy(logits.view((-1, CLASSES)), labels, ignore_index=3, reduction="sum") / labels.numel()


def by_module(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(logits[:, 1:].to(torch.float32).reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


IN_PIECES = [plain, shifted, smoothed, capped, summed, by_module]


def with_another_term(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), weight=torch.linspace(1, 2, CLASSES).to(logits))


def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the shapes of the outputs that linear layers compute."""
    seen: list[Any] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *others: seen.append(x.shape[:-1]) or linear(x, *others))
    return seen


@pytest.mark.parametrize("loss", [*IN_PIECES, with_another_term, weighted])
@pytest.mark.parametrize("form", [{}, {"tied": True, "bias": False}])
@pytest.mark.parametrize("pieces", [1, 4, 100])
def test_loss_and_gradients_are_those_of_the_plain_head(loss: Any, form: dict[str, bool], pieces: int) -> None:
    exact = Model(loss, **form)

    (wanted, gradients), (found, others) = result(exact), result(in_pieces(exact, pieces))

    torch.testing.assert_close(found, wanted)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient)


@pytest.mark.parametrize("loss", IN_PIECES)
def test_halves_under_autocast_are_as_near_the_truth_as_torchs(loss: Any) -> None:
    exact = Model(loss)
    (_, truth), (_, half), (_, found) = (
        result(exact),
        result(copy.deepcopy(exact), torch.bfloat16),
        result(in_pieces(exact), torch.bfloat16),
    )

    for gradient, torchs, ours in zip(truth, half, found, strict=True):
        assert (ours - gradient).norm() <= 1.5 * (torchs - gradient).norm() + 1e-6 * gradient.norm()


@pytest.mark.parametrize("loss", IN_PIECES)
def test_the_head_computes_no_more_than_a_piece_at_a_time(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_pieces(Model(loss), pieces=7)
    seen = made(monkeypatch)

    result(model)

    of_head = [shape.numel() for shape in seen if shape != (3, 7)]
    assert sum(of_head) >= 2 * 14  # forward, and again in backward
    assert max(of_head) <= 3


def test_whoever_asks_for_the_values_gets_them() -> None:
    seen: list[Tensor] = []
    exact = Model(lambda logits, labels: seen.append(logits) or plain(logits, labels))  # type: ignore[func-returns-value]
    model = in_pieces(exact)

    result(exact)
    result(model)

    wanted, found = seen
    assert isinstance(found, Logits)
    assert (found.shape, found.dtype, found.dim(), found.size(-1)) == (wanted.shape, wanted.dtype, 3, CLASSES)
    torch.testing.assert_close(found.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(found + 0, wanted)
    torch.testing.assert_close(found[0, 1], wanted[0, 1])
    torch.testing.assert_close(found[..., 3], wanted[..., 3])
    torch.testing.assert_close(found.view(3, -1), wanted.view(3, -1))
    torch.testing.assert_close(found.detach().softmax(-1), wanted.detach().softmax(-1))


def test_outside_of_training_the_head_is_as_it_was() -> None:
    model = in_pieces(Model(lambda logits, labels: logits))

    assert type(model.eval()(*batch())) is Tensor
    with torch.no_grad():
        assert type(model.train()(*batch())) is Tensor


def test_logits_that_are_written_to_are_refused() -> None:
    def masked(logits: Tensor, labels: Tensor) -> Tensor:
        logits[..., 0] = -1e4
        return plain(logits, labels)

    with pytest.raises(ConversionError, match="the logits are changed in place"):
        result(in_pieces(Model(masked)))


@pytest.mark.parametrize("head", ["", "head=middle.x", "head=embed"])
def test_a_head_that_cannot_be_found_is_asked_for(head: str) -> None:
    spec = ",".join(filter(None, ["chunked_loss", head]))
    with pytest.raises(NothingToConvertError, match=r"name the nn\.Linear that makes the logits, .*head=lm_head"):
        schemes.build(spec).apply(TrainingSetup(Model(plain)))


def test_the_loss_has_the_type_that_it_has_without_pieces() -> None:
    exact = Model(plain)
    for dtype in (None, torch.bfloat16):
        assert result(in_pieces(exact), dtype)[0].dtype is result(exact, dtype)[0].dtype is torch.float32
    logits = in_pieces(Model(lambda logits, labels: logits))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits(*batch())
    assert found.dtype is found.detach().norm().dtype is torch.bfloat16


def test_what_is_asked_of_logits_is_answered() -> None:
    found: Any = in_pieces(Model(lambda logits, labels: logits))(*batch())

    assert torch.zeros(3, 7, CLASSES).copy_(found.detach()).norm() > 0
    assert found.type() == "torch.FloatTensor"
    assert found[0][:, True, :5].shape == (7, 1, 5)
    assert found.requires_grad
    assert found.grad_fn is not None


def test_it_cannot_be_limited_to_a_part() -> None:
    with pytest.raises(SpecError, match="this scheme changes loss"):
        schemes.build("chunked_loss,only=head")
