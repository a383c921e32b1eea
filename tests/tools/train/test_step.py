from __future__ import annotations

from typing import Any

import pytest
import torch

from actbench.errors import UsageError
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.records import Trained, TrainingCase

BASE = TrainingCase(
    model="tiny-gpt2@vocab_size=28,n_embd=16,n_layer=1,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
    data="text",
    sequence_length=64,
    batch_size=8,
    steps=4,
    learning_rate=3e-3,
    evaluate_every=100,
)


def trained(**fields: Any) -> Trained:
    loop = TrainingLoop(BASE.model_copy(update=fields))
    list(loop)
    return loop.result()


@pytest.mark.slow
def test_a_batch_in_parts_learns_the_same_and_keeps_less() -> None:
    whole, parts = trained(), trained(gradient_accumulation=4)
    quarter = trained(batch_size=2)

    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.final.loss == pytest.approx(whole.final.loss, rel=1e-5)
    assert parts.activation_bytes == quarter.activation_bytes + torch.float64.itemsize  # the weight of a part's loss
    # Gradients of earlier parts lie beside the activations of later ones: one of them is a whole gradient.
    assert quarter.peak_bytes < parts.peak_bytes < whole.peak_bytes


def test_a_gradient_is_cut_to_its_length() -> None:
    loop = TrainingLoop(BASE.model_copy(update={"max_grad_norm": 0.01, "optimizer": "sgd", "learning_rate": 1.0}))
    before = [p.detach().clone() for p in loop._setup.module.parameters()]

    next(iter(loop))

    moved = [p.detach() - b for p, b in zip(loop._setup.module.parameters(), before, strict=True)]
    assert torch.cat([m.flatten() for m in moved]).norm() == pytest.approx(0.01, rel=1e-3)


def test_a_step_whose_gradient_is_no_number_is_left_out_in_float16() -> None:
    loop = TrainingLoop(BASE.model_copy(update={"autocast": "float16"}))
    step = loop._step
    assert step.scaler.get_scale() == 2.0**16
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    before = [p.detach().clone() for p in loop._setup.module.parameters()]

    next(iter(loop))

    assert all(torch.equal(p, b) for p, b in zip(loop._setup.module.parameters(), before, strict=True))
    assert step.scaler.get_scale() == 2.0**99
    assert next(iter(loop)) == pytest.approx(trained(steps=1).losses[0], rel=1e-2)


@pytest.mark.slow
def test_float16_learns_what_float32_learns() -> None:
    assert trained(autocast="float16", max_grad_norm=1.0).losses == pytest.approx(
        trained(max_grad_norm=1.0).losses, rel=1e-3
    )


@pytest.mark.parametrize("fields", [{"max_grad_norm": 1.0}, {"autocast": "float16"}])
def test_gradients_that_wait_packed_cannot_be_cut_or_scaled(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="takes each gradient"):
        list(TrainingLoop(BASE.model_copy(update={"scheme": "smaq,on=gradients", **fields})))


def test_parts_must_be_equal() -> None:
    with pytest.raises(UsageError, match="multiple of 3"):
        TrainingLoop(BASE.model_copy(update={"gradient_accumulation": 3}))
