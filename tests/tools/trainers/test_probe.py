"""A probe of a session: how far the gradient of one batch is off."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from sessionmodels import Network, batch, open_session, step
from torch.utils.checkpoint import checkpoint

from actbench.tools.trainers.probe import Probe
from actbench.tools.trainers.session import SchemeCallback


@pytest.mark.filterwarnings("ignore:randomized.0.5 takes the gradient")
def test_a_probe_compares_the_gradient_of_one_batch_and_leaves_the_training_as_it_is() -> None:
    torch.manual_seed(3)
    probed, alone = Network(), Network()
    sessions = [open_session(probed, "randomized:0.5", probe=True), open_session(alone, "randomized:0.5")]
    for model in (probed, alone):
        torch.manual_seed(5)
        for _ in range(3):
            step(model)
    probe = sessions[0].watch.probe

    assert probe is not None
    assert probe.error is not None
    assert 0.01 < probe.error < 5
    for mine, other in zip(probed.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    for session in sessions:
        session.close()


def test_a_probe_of_an_exact_gradient_finds_no_error() -> None:
    model = Network()
    session = open_session(model, "checkpoint,blocks=Linear", probe=True)
    step(model)
    step(model)

    assert session.watch.probe is not None
    assert session.watch.probe.error == 0.0
    session.close()


def test_a_gradient_that_cannot_be_compared_is_warned_of_and_training_goes_on() -> None:
    model, plain = Network(), Network()
    for each in (model, plain):
        run = each.layers.forward
        each.layers.forward = partial(checkpoint, run, use_reentrant=True)  # type: ignore[method-assign]
    session = open_session(model, "fewbit:3", probe=True)
    given = batch()
    given["x"].requires_grad_()
    model(**given)["loss"].backward()  # without a parameter before the block, which autograd.grad then skips
    with pytest.warns(UserWarning, match="the gradient could not be compared: re-entrant checkpointing"):
        model(**given)["loss"].backward()
    for _ in range(2):
        plain(**given)["loss"].backward()

    assert session.watch.probe is not None
    assert session.watch.probe.error is None
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)  # type: ignore[arg-type]
    session.close()


def test_an_error_of_torch_is_a_warning_and_leaves_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    model = Network()
    session = open_session(model, "fewbit:3", probe=True)
    step(model)
    monkeypatch.setattr(torch.autograd, "grad", refuses)
    with pytest.warns(UserWarning, match="the gradient could not be compared: no room"):
        step(model)

    assert session.watch.probe is not None
    assert session.watch.probe.error is None
    assert session.watch.passes == 2
    session.close()


@pytest.mark.filterwarnings("error")
def test_a_pass_without_a_gradient_has_no_error() -> None:
    model = Network().requires_grad_(False)
    probe = Probe(nullcontext, "fewbit:3")
    probe.run(model, lambda module, **given: Network.forward(module, **given), (), batch())
    assert probe.error is None

    given = batch()
    given["x"].requires_grad_()
    probe.run(model, lambda module, **given: Network.forward(module, **given), (), given)
    assert probe.error is None


def test_a_large_error_is_warned_of_and_logged() -> None:
    model = Network()
    callback = SchemeCallback("randomized:0.03", probe=True)
    callback.begin(model)
    step(model)
    with pytest.warns(UserWarning, match="takes the gradient of Network far from the exact one"):
        step(model)

    assert callback.numbers()["actbench/gradient_error"] > 0.5
    callback.close()


def test_an_error_that_records_have_is_warned_of(tmp_path: Any, monkeypatch: Any, make_record: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    record = make_record("fewbit:1", model="tiny", gradient_error=1.6)
    (tmp_path / "results" / "box.jsonl").write_text(record.model_dump_json() + "\n")
    model = Network()
    model.config = type("Config", (), {"name_or_path": "org/tiny"})()  # type: ignore[assignment]
    callback = SchemeCallback("fewbit:1")
    with pytest.warns(UserWarning, match=r"relative error 1\.6 \(measured at batch 8, results/box.jsonl\)"):
        callback.begin(model)
    callback.close()
