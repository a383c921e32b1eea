"""A batch in micro-batches: what is kept, what is reported, and what cannot be cut."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, SpecError, UsageError
from actbench.measuring.bench import Session, gradients_of
from actbench.model.records import Case
from actbench.scheme.microbatches import Batch, cut
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.tools.train.loop import TrainingLoop
from actbench.tools.train.records import TrainingCase
from actbench.workload import losses


@functools.cache
def measured(spec: str, **fields: Any) -> Any:
    case = {"model": "tiny-llama", "batch_size": 8, "sequence_length": 32, "meter": "cpu", **fields}
    return Session(Case.model_validate({"scheme": spec, **case})).memory()


@pytest.mark.slow
def test_activations_are_those_of_a_batch_of_the_largest_part() -> None:
    part, found = measured("exact", batch_size=3), measured("accumulate:4", batch_size=10)

    assert found.activation_bytes == pytest.approx(part.activation_bytes, rel=0.001)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("rows", [10, 3])
def test_both_meters_see_the_same_bytes(rows: int) -> None:
    cpu = measured("accumulate:4", batch_size=rows)
    simulated = measured("accumulate:4", batch_size=rows, meter="simulated", device_profile="cpu")

    assert simulated.peak_bytes == pytest.approx(cpu.peak_bytes, rel=0.001)
    assert simulated.activation_bytes == pytest.approx(cpu.activation_bytes, rel=0.001)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("meter", ["cpu", "simulated"])
def test_a_peak_with_a_later_micro_batch_is_of_its_activations(meter: str) -> None:
    fields = {"batch_size": 32, "sequence_length": 64, "optimizer": "sgd", "meter": meter, "device_profile": "cpu"}
    found = measured("accumulate:4", **fields)

    parts = found.peak_parts
    assert found.peak_phase == "backward"
    assert parts.gradients_bytes == pytest.approx(found.gradients_bytes, rel=0.01)  # those of earlier ones are there
    assert found.activation_bytes / 2 < parts.activation_bytes <= found.activation_bytes
    assert sum(parts.model_dump().values()) == found.peak_bytes


@pytest.mark.slow
def test_dropout_does_not_count_as_an_error_of_the_gradient() -> None:
    found = measured("accumulate:4", model="tiny-roberta")

    assert 0 < found.gradient_error < 1e-5
    assert found.warnings == ()


@pytest.mark.slow
def test_batch_norms_are_told_and_their_error_is_seen() -> None:
    found = measured("accumulate:4", model="resnet-cifar", image_size=16)

    assert any("takes its statistics from the micro-batch" in warning for warning in found.warnings)
    assert found.gradient_error > 0.01


def test_a_small_batch_is_cut_into_its_rows_and_says_so() -> None:
    assert any(
        "3 rows: it is cut into 3 parts, not 4" in text for text in measured("accumulate:4", batch_size=3).warnings
    )


@pytest.mark.exhaustive
def test_the_largest_batch_is_larger() -> None:
    limit = {"meter": "simulated", "memory_limit_bytes": 24 * 2**20, "find_largest_batch": True, "batch_size": 1}

    assert measured("accumulate:4", **limit).largest_batch > 1.5 * measured("exact", **limit).largest_batch


def test_labels_of_a_masked_model_are_weighted_by_how_many_there_are() -> None:
    """Fifteen in a hundred labels count, drawn by chance, so that no two micro-batches have as many."""
    case = Case(
        model="tiny-roberta@hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0", task="masked-lm", batch_size=7
    )
    workload = workloads.load_workload(case)
    batch = workload.batch(7, seed=0)
    setup = workload.setup(materialize=True, seed=0)
    shares = [part.share for part in cut(batch, 4)]
    exact = gradients_of(setup, batch, seed=0)

    found = gradients_of(schemes.build("accumulate:4").apply(setup), batch, seed=0)

    assert len(set(shares)) == 4
    assert sum(shares) == pytest.approx(1.0)
    for parameter, gradient in exact.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-6)


def mean_loss(module: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = (module(batch["x"]) - batch["y"]).square().mean()
    return error * batch["scale"]


def own(rows: int = 10) -> tuple[TrainingSetup, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, 8), "y": torch.randn(rows, 4), "scale": torch.tensor(2.0), "names": ["a"] * rows}
    module = nn.Linear(8, 4)
    return TrainingSetup(module, mean_loss, lambda module: torch.optim.SGD(module.parameters(), lr=0.1)), batch


def test_a_loss_of_ones_own_is_a_mean_over_rows() -> None:
    setup, batch = own()
    exact = TrainStep(setup, batch)
    whole = exact()
    module = setup.module.weight.detach().clone()
    again, _ = own()

    found = TrainStep(schemes.build("accumulate:4").apply(again), batch)

    assert [len(part.batch["x"]) for part in found.micro_batches] == [3, 3, 2, 2]
    assert all(len(part.batch["names"]) == len(part.batch["x"]) for part in found.micro_batches)
    torch.testing.assert_close(found(), whole)
    torch.testing.assert_close(again.module.weight.detach(), module)


@pytest.mark.parametrize(("reduction", "shares"), [("mean", [1 / 3] * 3), ("sum", [1, 1, 1])])
def test_a_mean_of_ctc_is_over_rows_whatever_their_labels(reduction: str, shares: list[float]) -> None:
    module = nn.Module()
    module.config = SimpleNamespace(ctc_loss_reduction=reduction)
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100], [1, -100, -100, -100]])

    parts = cut({"labels": labels}, 3, losses.in_parts(module, "ctc").share)

    assert [part.share for part in parts] == pytest.approx(shares)


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(module(batch["x"]), batch["labels"])

    setup, _ = own()
    batch = {"x": torch.randn(4, 8), "labels": torch.tensor([-100, -100, 1, -100])}
    step = TrainStep(
        schemes.build("accumulate:4").apply(TrainingSetup(setup.module, loss, setup.make_optimizer)), batch
    )

    step.backward(step.forward())

    torch.testing.assert_close(step.loss, loss(setup.module, batch).detach())
    assert setup.module.weight.grad.isfinite().all()


@pytest.mark.parametrize("more", [{"edges": torch.zeros(7)}, {"parts": [1, 2, 3]}])
def test_batches_that_cannot_be_cut_are_refused(more: dict[str, Any]) -> None:
    setup, batch = own()
    step = TrainStep(schemes.build("accumulate:4").apply(setup), {**batch, **more})

    with pytest.raises(UsageError, match=r"x \(10, 8\).*a row for each sample"):
        step.forward()


def test_it_is_said_once() -> None:
    with pytest.raises(SpecError, match="both say when the optimizer steps"):
        schemes.build("accumulate:2+release")
    with pytest.raises(ConversionError, match="say it once"):
        schemes.build("accumulate:2").apply(schemes.build("accumulate:4").apply(own()[0]))
    for spec in ("accumulate:1", "accumulate:0", "accumulate:x"):
        with pytest.raises(SpecError, match="parts"):
            schemes.build(spec)


RUN = TrainingCase(
    model="tiny-gpt2@vocab_size=28,n_embd=16,n_layer=1,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0",
    data="text", sequence_length=32, batch_size=8, steps=3, learning_rate=3e-3, evaluate_every=100,
)  # fmt: skip


def test_training_runs_are_those_of_gradient_accumulation() -> None:
    by_scheme = TrainingLoop(RUN.model_copy(update={"scheme": "accumulate:4"}))
    by_key = TrainingLoop(RUN.model_copy(update={"gradient_accumulation": 4}))

    assert list(by_scheme) == list(by_key)
    with pytest.raises(ConversionError, match="gradient_accumulation"):
        TrainingLoop(RUN.model_copy(update={"scheme": "accumulate:4", "gradient_accumulation": 2}))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("spec", "rel"), [("release", 0.0), ("pure", 0.01), ("autocast", 0.01)])
def test_other_schemes_of_a_step_train_too(spec: str, rel: float) -> None:
    assert list(TrainingLoop(RUN.model_copy(update={"scheme": spec}))) == pytest.approx(
        list(TrainingLoop(RUN)), rel=rel
    )


@pytest.mark.parametrize("fields", [{"gradient_accumulation": 2}, {"max_grad_norm": 1.0}, {"autocast": "fp16"}])
def test_release_is_refused_where_gradients_have_to_wait(fields: dict[str, Any]) -> None:
    case = RUN.model_validate({**RUN.model_dump(), "scheme": "release", **fields})

    with pytest.raises((UsageError, ConversionError), match=r"release|takes each gradient"):
        list(TrainingLoop(case))
