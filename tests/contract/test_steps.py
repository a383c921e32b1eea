"""What every scheme that changes the loss, optimizer, gradients, batch or precision of a step promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actbench import scheme as schemes, workload as workloads
from actbench.measuring import inspection
from actbench.measuring.bench import gradients_of, relative_error_and_cosine
from actbench.measuring.meters import footprint
from actbench.methods.offload import hostoptimizer
from actbench.model.records import Case
from actbench.ops import hostmemory
from actbench.scheme.base import Change
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep

CASE = Case(model="tiny-gpt2", batch_size=2, sequence_length=16, gradient_quality=False)
EXAMPLES = {
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "fira": "fira:8",
    "galore": "galore:8",
    "randomized": "randomized:0.5",
}
STATE = {"adam_mini": 0.52, "schedule_free": 1.001}  # the first moment whole; as many bytes as Adam
"""What schemes keep of Adam's state, if it is more than half."""
MODELS = {"resilu2": "tiny-gpt2@activation_function=silu", "liger": "tiny-llama"}


def specs(*changes: Change) -> list[str]:
    """Return a specification of every scheme but the exact one, or of those that change one of these."""
    found = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in ("exact", "channels_last")]
    return [spec for spec in found if not changes or set(changes) & set(schemes.build(spec).changes)]


def case_for(spec: str) -> Case:
    return CASE.model_copy(update={"model": MODELS.get(spec, CASE.model)})


def make_batch() -> Batch:
    return workloads.load_workload(CASE).batch(CASE.batch_size, seed=0)


@pytest.fixture
def setup(spec: str) -> TrainingSetup:
    return workloads.load_workload(case_for(spec)).setup(materialize=True, seed=0)


@pytest.fixture
def batch() -> Batch:
    return make_batch()


@pytest.fixture(autouse=True)
def _same_noise() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def losses(setup: TrainingSetup, batch: Batch) -> torch.Tensor:
    torch.manual_seed(1)
    return setup.forward(batch).detach()


@pytest.mark.parametrize("spec", specs("loss"))
def test_a_scheme_of_the_loss_gives_the_same_value_and_gradients_to_rounding(
    spec: str, setup: TrainingSetup, batch: Batch
) -> None:
    def after(setup: TrainingSetup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(1)
        step = TrainStep(setup, batch)
        loss = step.forward()
        step.backward(loss)
        return loss.detach(), [gradient.clone() for gradient in step.gradients().values()]

    loss, gradients = after(workloads.load_workload(case_for(spec)).setup(materialize=True, seed=0))
    found, others = after(schemes.build(spec).apply(setup))

    torch.testing.assert_close(found, loss)
    for one, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(one, other)


KEEP_MORE = {"ema"}  # its bytes are tested beside it


@pytest.mark.parametrize("spec", [spec for spec in specs("optimizer") if schemes.build(spec).changes == ("optimizer",)])
def test_a_scheme_of_the_optimizer_alone_leaves_gradients_and_keeps_less_state_on_the_device(
    spec: str, setup: TrainingSetup, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostoptimizer, "is_elsewhere", lambda tensor: True)

    def after(setup: TrainingSetup) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(1)
        step = TrainStep(setup, batch)
        step.backward(step.forward())
        gradients = [gradient.clone() for gradient in step.gradients().values()]
        step.update()
        state = footprint.optimizer_state(step.optimizer)
        return gradients, footprint.stored_bytes(
            each for each in state if each.untyped_storage() not in hostmemory.NOTED
        )

    exact, exact_bytes = after(workloads.load_workload(case_for(spec)).setup(materialize=True, seed=0))
    found, found_bytes = after(schemes.build(spec).apply(setup))

    assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
    assert (spec in KEEP_MORE) == (found_bytes > exact_bytes)
    assert spec in KEEP_MORE or found_bytes < exact_bytes * STATE.get(spec, 0.5)


def trained(setup: TrainingSetup, batch: Batch, steps: int = 2) -> tuple[list[torch.Tensor], int]:
    """Return the weights after some steps, and the bytes of gradients that wait for the last of them."""
    torch.manual_seed(1)
    step, held = TrainStep(setup, batch), 0
    for _ in range(steps):
        step.backward(step.forward())
        held = footprint.stored_bytes(footprint.gradients(step))
        step.update()
    return [parameter.detach() for parameter in setup.module.parameters()], held


@pytest.mark.parametrize("spec", [spec for spec in specs("gradients") if schemes.build(spec).changes == ("gradients",)])
def test_a_scheme_of_the_gradients_alone_trains_alike_with_fewer_of_them(
    spec: str, setup: TrainingSetup, batch: Batch
) -> None:
    weights, held = trained(workloads.load_workload(case_for(spec)).setup(materialize=True, seed=0), batch)
    before = [parameter.detach().clone() for parameter in setup.module.parameters()]
    found, fewer = trained(schemes.build(spec).apply(setup), batch)

    assert fewer < held / 2
    assert all(torch.equal(one, other) for one, other in zip(found, weights, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(found, before, strict=True))


@pytest.mark.parametrize("spec", specs("gradients"))
def test_gradients_are_looked_at_without_a_step(spec: str, setup: TrainingSetup, batch: Batch) -> None:
    converted = schemes.build(spec).apply(setup)
    before = [parameter.detach().clone() for parameter in setup.module.parameters()]

    found = gradients_of(converted, batch, seed=0)
    rounded = gradients_of(converted, batch, seed=0)

    assert set(found) == set(setup.module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(setup.module.parameters(), before, strict=True))
    assert set(rounded) == set(found)


def uneven(labels: torch.Tensor) -> torch.Tensor:
    """Ignore a label more in each row, and all of the last one."""
    ignored = torch.arange(labels.shape[1]) < 2 * torch.arange(len(labels))[:, None]
    ignored[-1] = True
    return labels.masked_fill(ignored, -100)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("rows", [3, 6, 8])
@pytest.mark.parametrize("spec", [spec for spec in specs("batch") if schemes.build(spec).changes == ("batch",)])
def test_a_scheme_of_the_batch_gives_the_same_value_and_gradients_to_rounding(spec: str, rows: int) -> None:
    case = CASE.model_copy(update={"model": "tiny-gpt2@resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"})
    batch = dict(workloads.load_workload(case).batch(rows, seed=0))
    batch["labels"] = uneven(batch["labels"])

    def after(setup: TrainingSetup) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        step = TrainStep(setup, batch)
        step.backward(step.forward())
        gradients = {name: parameter.grad for name, parameter in setup.module.named_parameters()}
        return step.loss, gradients, inspection.trace(setup, lambda: batch).total_bytes

    loss, gradients, kept = after(workloads.load_workload(case).setup(materialize=True, seed=0))
    found, others, fewer = after(
        schemes.build(spec).apply(workloads.load_workload(case).setup(materialize=True, seed=0))
    )

    torch.testing.assert_close(found, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient)
    assert fewer < 0.6 * kept


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("spec", specs("precision"))
def test_a_scheme_of_the_precision_gives_nearly_the_same_value_and_gradients_and_keeps_less(
    spec: str, setup: TrainingSetup, batch: Batch
) -> None:
    many = workloads.load_workload(CASE.model_copy(update={"sequence_length": 64})).batch(
        8, seed=0
    )  # autocast copies weights
    exact, before = gradients_of(setup, batch, seed=0), inspection.trace(setup, lambda: many).total_bytes
    loss = losses(setup, batch)

    converted = schemes.build(spec).apply(setup)
    found = gradients_of(converted, batch, seed=0)
    error, cosine = relative_error_and_cosine(found, exact)

    assert 0 < error < 0.05
    assert cosine > 0.999
    torch.testing.assert_close(losses(converted, batch).float(), loss, rtol=0.01, atol=0)
    assert inspection.trace(converted, lambda: many).total_bytes < 0.9 * before
