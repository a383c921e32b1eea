"""What every scheme of the registry promises; a new scheme is tested as soon as its file exists."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, SpecError, UntraceableError
from actbench.measuring import inspection
from actbench.measuring.meters.cpumeter import CpuMeter
from actbench.methods.lora.lowrank import base_state_dict
from actbench.model.records import Case
from actbench.scheme.base import OF_PARTS, Change
from actbench.scheme.conditions import Limits
from actbench.scheme.facets import LossyForward
from actbench.scheme.microbatches import Batch
from actbench.scheme.setup import TrainingSetup, TrainStep
from actbench.testing import PARTS, check_scheme

CASE = Case(model="tiny-gpt2", batch_size=2, sequence_length=16, gradient_quality=False)
EXAMPLES = {
    "compile": "compile:0.5,backend=aot_eager_decomp_partition",
    "encode": "encode:int:6",
    "fewbit": "fewbit:3",
    "randomized": "randomized:0.5",
}
MODELS = {"resilu2": "tiny-gpt2@activation_function=silu", "liger": "tiny-llama"}


def blocks_of(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the path of a model's blocks, and the blocks."""
    path = "model.layers" if "Llama" in type(model).__name__ else "transformer.h"
    return path, model.get_submodule(path)


SLOW = ("simulation", "compilation", "saved bytes")
TWICE = ("actnn", "checkpoint", "fewbit:3", "gact", "lora", "smaq,on=activations")  # layers, calls, hooks, parameters
MODULES_ALONE = {"encode:int:6": "encode:int:6,on=activations", "smaq": "smaq,on=activations"}


def specs(*changes: Change) -> list[str]:
    """Return a specification of every scheme but the exact one, or of those that change one of these."""
    found = [EXAMPLES.get(name, name) for name in schemes.alone() if name not in ("exact", "channels_last")]
    return [spec for spec in found if not changes or set(changes) & set(schemes.build(spec).changes)]


def traced(*changes: Change) -> list[str]:
    """Return those of schemes whose steps fake tensors show; the others are compared on a meter, in their own tests."""
    return [spec for spec in specs(*changes) if not is_untraceable(spec)]


def is_untraceable(spec: str) -> bool:
    """Return whether fake tensors do not show what a scheme saves."""
    return bool((schemes.build(spec).facet(Limits) or Limits()).untraceable)


def limited() -> list[str]:
    """Return specifications of schemes that can be limited to parts of a model."""
    found = [MODULES_ALONE.get(spec, spec) for spec in traced(*OF_PARTS)]
    return [spec for spec in found if set(schemes.build(spec).changes) <= OF_PARTS]


def case_for(spec: str) -> Case:
    return CASE.model_copy(update={"model": MODELS.get(spec, CASE.model)})


def own_model(spec: str) -> str:
    """Return a scheme that has a model of its own; the others share one trace of the exact model."""
    return spec if spec in MODELS else ""


workload_of = functools.cache(workloads.load_workload)


def make_batch() -> Batch:
    return workload_of(CASE).batch(CASE.batch_size, seed=0)


def make_setup(spec: str) -> TrainingSetup:
    return workload_of(case_for(spec)).setup(materialize=True, seed=0)


@pytest.fixture
def setup(spec: str) -> TrainingSetup:
    return make_setup(spec)


@pytest.fixture
def batch() -> Batch:
    return make_batch()


@functools.cache
def traced_under(spec: str, like: str) -> tuple[TrainingSetup, inspection.Trace]:
    """Return a setup under a scheme and what its step saves, once for all tests; ``like`` names whose model it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        converted = schemes.build(spec).apply(make_setup(like))
        return converted, inspection.trace(converted, make_batch)


def kept(spec: str, like: str) -> int:
    return traced_under(spec, like)[1].total_bytes


@pytest.fixture(autouse=True)
def _same_noise() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.sampled(fast=8, slow=12)] * (part in SLOW)) for part in PARTS]
)
@pytest.mark.parametrize("spec", ["exact", *specs()])
def test_a_part_of_the_contract(spec: str, part: str) -> None:
    check_scheme(spec, on=case_for(spec).model, batch_size=2, parts=[part])


@pytest.mark.parametrize("spec", [spec for spec in specs() if "parameters" not in schemes.build(spec).changes])
def test_keys_parameters_ties_and_flags_survive(spec: str, setup: TrainingSetup) -> None:
    model = setup.module
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    embedding.requires_grad_(False)
    blocks_of(model)[1][0].eval()

    converted: Any = schemes.build(spec).apply(setup).module

    is_tied = head is embedding
    assert is_tied or MODELS.get(spec) == "tiny-llama"
    assert list(converted.state_dict()) == keys
    assert {name: id(p) for name, p in converted.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert (converted.get_output_embeddings().weight is converted.get_input_embeddings().weight) == is_tied
    assert not converted.get_input_embeddings().weight.requires_grad
    blocks = blocks_of(converted)[1]
    assert all(not child.training for child in blocks[0].modules())
    assert blocks[1].training


@pytest.mark.parametrize("spec", specs("parameters"))
def test_a_scheme_of_parameters_trains_few_and_gives_the_base_back(
    spec: str, setup: TrainingSetup, batch: Batch
) -> None:
    model, scheme = setup.module, schemes.build(spec)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.transformer.h[0].eval()
    kind, trained = type(model), sum(p.numel() for p in model.parameters())

    setup = scheme.apply(setup)
    converted: Any = setup.module
    before = {name: p.detach().clone() for name, p in converted.named_parameters()}
    step = TrainStep(setup, batch)
    for _ in range(2):  # a matrix beside one of zeros has a gradient of zeros
        step()

    changed = {name for name, p in converted.named_parameters() if not torch.equal(p, before[name])}
    assert type(converted) is kind
    assert changed == {name for name, p in converted.named_parameters() if p.requires_grad}
    assert changed == {name for name, p in converted.named_parameters() if p in step.optimizer.state}
    assert sum(p.numel() for p in converted.parameters() if p.requires_grad) < trained / 2
    assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    assert all(not child.training for child in converted.transformer.h[0].modules())
    assert converted.transformer.h[1].training
    found = base_state_dict(converted)
    assert found.keys() == base.keys()
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (base[name].shape, base[name].dtype)
        assert bool(scheme.facet(LossyForward)) or torch.equal(tensor, base[name])
        assert (tensor - base[name]).norm() <= 0.15 * base[name].norm()


@pytest.mark.parametrize("spec", [spec for spec in specs() if is_untraceable(spec)])
def test_what_cannot_be_traced_says_so_and_keeps_less_by_the_allocator(
    spec: str, setup: TrainingSetup, batch: Batch
) -> None:
    exact = CpuMeter().memory(TrainStep(setup, batch)).activation_bytes

    converted = schemes.build(spec).apply(setup)

    with pytest.raises(UntraceableError):
        inspection.trace(converted, make_batch)
    assert CpuMeter().memory(TrainStep(converted, batch)).activation_bytes < exact


@pytest.mark.sampled(fast=3, slow=5)
@pytest.mark.parametrize("spec", limited())
def test_a_scheme_limited_to_a_part_changes_nothing_else(spec: str, setup: TrainingSetup) -> None:
    parameters = dict(setup.module.named_parameters())

    block = f"{blocks_of(setup.module)[0]}.1"

    part = schemes.build(f"{spec},only={block}").apply(setup)

    assert part.sites
    assert all(site.path.startswith(block) for site in part.sites)
    if "parameters" in schemes.build(spec).changes:
        plain = {name for name, p in part.module.named_parameters() if not name.startswith(f"{block}.")}
        assert plain == {name for name in parameters if not name.startswith(f"{block}.")}
        assert all(p.requires_grad for name, p in part.module.named_parameters() if name in plain)
        return
    assert kept(spec, spec) < kept(f"{spec},only={block}", spec) < kept("exact", own_model(spec))


@pytest.mark.parametrize(
    "spec", [spec if spec in TWICE else pytest.param(spec, marks=pytest.mark.sampled(slow=8)) for spec in limited()]
)
def test_a_scheme_stands_twice_for_parts_that_do_not_overlap(spec: str, setup: TrainingSetup) -> None:
    path = blocks_of(setup.module)[0]
    one = f"{spec},only={path}.1"

    both = schemes.build(f"{spec},only={path}.0+{one}").apply(setup)

    if "parameters" in schemes.build(spec).changes:
        assert len(both.sites) == 2 * len(traced_under(one, spec)[0].sites)
    else:
        assert inspection.trace(both, make_batch).total_bytes < kept(one, spec)
    step = TrainStep(both, make_batch())
    step.backward(step.forward())
    assert all(p.grad.isfinite().all() if p.requires_grad else p.grad is None for p in both.module.parameters())


@pytest.mark.sampled(fast=15, slow=15)
@pytest.mark.parametrize("spec", specs())
def test_a_copy_stands_on_its_own(spec: str, setup: TrainingSetup, batch: Batch) -> None:
    converted = schemes.build(spec).apply(setup)
    twin = copy.deepcopy(converted.module)

    loss = setup.loss(twin, batch)  # type: ignore[misc]
    loss.backward()  # type: ignore[no-untyped-call]

    assert all(p.grad is None for p in converted.module.parameters())
    assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)


@pytest.mark.parametrize("spec", specs())
def test_converting_nothing_is_refused(spec: str) -> None:
    with pytest.raises(ConversionError):
        actbench.convert(torch.nn.Flatten(), spec)


@pytest.mark.parametrize("first", specs())
def test_the_order_of_composition_changes_nothing(first: str) -> None:
    for second in specs()[specs().index(first) + 1 :]:
        try:
            forwards = schemes.build(f"{first}+{second}")
        except SpecError:
            with pytest.raises(SpecError, match=f"{second.partition(':')[0]} and {first.partition(':')[0]} both "):
                schemes.build(f"{second}+{first}")
            continue
        backwards = schemes.build(f"{second}+{first}")

        assert forwards == backwards, second
        assert forwards.spec == backwards.spec


def test_many_schemes_stand_together() -> None:
    together: list[str] = []
    for spec in specs():
        with contextlib.suppress(SpecError):
            schemes.build("+".join([*together, spec]))
            together.append(spec)

    assert len(together) >= 5
    assert schemes.build("+".join(together)) == schemes.build("+".join(reversed(together)))
