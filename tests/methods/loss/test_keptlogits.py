"""Cross entropy in pieces of logits that are kept in their own type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from languagemodels import CLASSES, Model, batch, plain, result
from torch import Tensor
from torch.nn import functional as F

from actbench import scheme as schemes
from actbench.errors import SpecError
from actbench.measuring import bench
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup
from actbench.testing import PARTS, check_scheme

SPEC = "chunked_loss:4,keep_logits=true"


def kept(exact: Model) -> Any:
    return schemes.build(f"{SPEC},head=head").apply(TrainingSetup(copy.deepcopy(exact))).module


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((torch.tanh(logits / 2.0) * 2.0).reshape(-1, CLASSES), labels.reshape(-1))


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits, labels) + smoothed(logits, labels)


@pytest.mark.parametrize("loss", [plain, smoothed, capped, twice])
@pytest.mark.parametrize("form", [{}, {"tied": True, "bias": False}])
def test_loss_and_gradients_are_those_of_the_plain_head(loss: Any, form: dict[str, bool]) -> None:
    exact = Model(loss, **form)

    (wanted, gradients), (found, others) = result(exact), result(kept(exact))

    torch.testing.assert_close(found, wanted)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient)


def test_the_head_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, linear = kept(Model(plain)), list[Any](), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *others: seen.append(others[0].shape[0]) or linear(x, *others))

    result(model)

    assert seen.count(CLASSES) == 4  # once for each piece; without keep_logits there are eight


@pytest.mark.slow
def test_logits_in_the_model_s_type_are_what_is_kept() -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "dtype": "bfloat16"}

    def saved(spec: str) -> int:
        found = bench.Session(Case(**fields, scheme=spec, gradient_quality=False)).memory().activation_bytes
        assert found is not None
        return found

    logits = 4 * 64 * 512 * 2  # tokens, vocabulary, bytes
    assert saved(SPEC) - saved("chunked_loss:4") == pytest.approx(logits, rel=0.01)
    assert saved("exact") - saved(SPEC) == pytest.approx(logits, rel=0.05)  # log_softmax is float32


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    model = kept(Model(plain))
    loss = model(*batch())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()

    for one, other in zip(first, (p.grad for p in model.parameters()), strict=True):
        assert torch.equal(one, other)


def test_liger_keeps_no_logits() -> None:
    with pytest.raises(SpecError, match="Liger's kernels keep gradients"):
        schemes.build("chunked_loss:liger,keep_logits=true")


@pytest.mark.slow
def test_the_contract_of_schemes_holds() -> None:
    parts = [part for part in PARTS if part != "saved bytes"]  # in float32 logits are as large as what torch keeps
    check_scheme(SPEC, on="tiny-llama", parts=parts)
