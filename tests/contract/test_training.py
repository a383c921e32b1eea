"""What a training loop may do with a converted model, for every scheme of the registry."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError
from actbench.model.records import Case
from actbench.ops import noise
from actbench.scheme.facets import LossyForward
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup

NO_DROPOUT = "resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
CASE = Case(model=f"tiny-gpt2@{NO_DROPOUT}", batch_size=2, sequence_length=16)
EXAMPLES = {
    "compile": "compile:0.5,backend=aot_eager_decomp_partition",
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "randomized": "randomized:0.5",
}
MODELS = {"resilu2": f"{CASE.model},activation_function=silu", "liger": "tiny-llama"}
SPECS = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in ("exact", "channels_last")]
STEADY = {"actnn": "actnn,per_layer=false"}  # layers share their bits out anew after the first step, by what it showed


workload_of = functools.cache(workloads.load_workload)


def converted(spec: str, like: str = "", **fields: object) -> TrainingSetup:
    """Return a setup with a scheme applied; ``like`` names the scheme whose model is taken."""
    case = CASE.model_copy(update={"model": MODELS.get(like or spec, CASE.model), **fields})
    setup = workload_of(case).setup(materialize=True, seed=0)
    with torch.random.fork_rng(devices=[]):  # some draw parameters
        return schemes.build(spec).apply(setup)


def batch() -> Batch:
    return workload_of(CASE).batch(CASE.batch_size, seed=0)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.sampled(fast=20, slow=15)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_accumulate(spec: str) -> None:
    setup = converted(STEADY.get(spec, spec), like=spec)
    state = torch.get_rng_state()
    setup.forward(batch()).backward()  # type: ignore[no-untyped-call]
    once = gradients(setup.module)
    torch.set_rng_state(state)

    setup.forward(batch()).backward()  # type: ignore[no-untyped-call]

    for twice, one in zip(gradients(setup.module), once, strict=True):
        torch.testing.assert_close(twice, 2 * one)


@pytest.mark.sampled(fast=15, slow=15)
@pytest.mark.parametrize("spec", SPECS)
def test_a_retained_graph_gives_the_same_gradient_twice(spec: str) -> None:
    setup = converted(spec)
    with functorch.patch(donated_buffer=False):  # as torch asks of those who retain a compiled graph
        loss = setup.forward(batch())
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        once = gradients(setup.module)
        loss.backward()  # type: ignore[no-untyped-call]

    for twice, one in zip(gradients(setup.module), once, strict=True):
        torch.testing.assert_close(twice, 2 * one)


@pytest.mark.parametrize("use_reentrant", [pytest.param(True, marks=pytest.mark.sampled(slow=8)), False])
@pytest.mark.parametrize("spec", SPECS)
def test_a_users_own_checkpointing_changes_no_gradient(
    spec: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one seed for all that is rounded or sketched: what runs again draws seeds of its own."""

    def embedded(model: nn.Module) -> Tensor:
        inputs = model.get_input_embeddings()(batch()["input_ids"])
        return inputs if inputs.requires_grad else inputs.requires_grad_()  # re-entrant checkpoints pass by it else

    monkeypatch.setattr(noise._seeds, "take", lambda device, count: torch.full((count,), 7))

    def loss_of(setup: TrainingSetup) -> Tensor:
        model = setup.module
        inputs = embedded(model)
        return model(inputs_embeds=inputs).logits.float().square().mean()

    def loss_inside(setup: TrainingSetup) -> Tensor:
        model = setup.module
        inputs = embedded(model)
        logits = checkpoint(lambda x: model(inputs_embeds=x).logits, inputs, use_reentrant=use_reentrant)
        return logits.float().square().mean()  # type: ignore[no-any-return]

    plain, inside = converted(spec), converted(spec)
    state = torch.get_rng_state()
    loss_of(plain).backward()  # type: ignore[no-untyped-call]
    torch.set_rng_state(state)
    loss_inside(inside).backward()  # type: ignore[no-untyped-call]

    found, expected = gradients(inside.module), gradients(plain.module)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("autocast", ["bfloat16", pytest.param("float16", marks=pytest.mark.sampled(slow=8))])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "precision" not in schemes.build(spec).changes])
def test_autocast_gives_the_same_loss_and_finite_gradients(spec: str, autocast: str) -> None:
    exact, setup = converted("exact", like=spec, autocast=autocast), converted(spec, autocast=autocast)

    loss = setup.forward(batch())
    loss.backward()  # type: ignore[no-untyped-call]

    scheme, expected = schemes.build(spec), exact.forward(batch())
    # processors may round a product of fewer rows otherwise
    in_pieces = "loss" in scheme.changes and torch.allclose(loss, expected, rtol=1e-6, atol=0)
    is_exact = torch.equal(loss, expected) or in_pieces
    is_lossy = scheme.facet(LossyForward) is not None
    assert is_exact or is_lossy
    assert not is_exact or not is_lossy or not scheme.card.draws_alike  # where masks alone differ
    assert all(p.grad.isfinite().all() if p.requires_grad else p.grad is None for p in setup.module.parameters())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "gradients" in schemes.build(spec).changes])
@pytest.mark.usefixtures("one_process")
def test_a_scheme_of_the_gradients_is_refused_where_they_are_averaged(spec: str) -> None:
    setup = converted(spec)

    with pytest.raises(ConversionError, match="DistributedDataParallel does not go with"):
        setup.loss(DistributedDataParallel(setup.module), batch())  # type: ignore[misc]


@pytest.mark.sampled(fast=15, slow=15)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "gradients" not in schemes.build(spec).changes])
@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_gives_the_same_gradient(spec: str) -> None:
    alone, setup = converted(spec), converted(spec)
    parallel, loss = DistributedDataParallel(setup.module), setup.loss
    assert loss is not None
    state = torch.get_rng_state()
    alone.forward(batch()).backward()  # type: ignore[no-untyped-call]
    torch.set_rng_state(state)

    replace(setup, loss=lambda _, batch: loss(parallel, batch)).forward(batch()).backward()  # type: ignore[no-untyped-call]

    for one, other in zip(gradients(setup.module), gradients(alone.module), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sampled(fast=15, slow=15)
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_kept_without_gradients(spec: str) -> None:
    setup = converted(spec)
    saved: list[Tensor] = []

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):  # type: ignore[arg-type]
        setup.forward(batch())

    assert saved == []
