"""A network that calls its activations as functions is converted like its twin that holds them as layers."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from calledtwins import SHAPES, SPECS, converted, converted_twins, equal, gradients, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actbench
from actbench import scheme as schemes
from actbench.measuring import inspection
from actbench.scheme.facets import Packs
from actbench.scheme.setup import TrainingSetup
from actbench.tools.convert.model import conversion_of


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_those_of_layers_to_the_bit(spec: str, shape: tuple[int, ...]) -> None:
    called, held = converted_twins(spec)
    x = torch.randn(shape)

    assert torch.equal(called(x), held(x))
    assert equal(gradients(called, x), gradients(held, x))


@pytest.mark.parametrize("spec", ["fewbit:3", "regelu2", "resilu2"])
def test_gradients_are_not_those_of_the_exact_network(spec: str) -> None:
    called, _ = twins(spec)
    x = torch.randn(SHAPES[0])
    exact = gradients(called, x)

    assert not equal(gradients(converted(called, spec), x), exact)


@pytest.mark.parametrize(
    ("spec", "shape"), [*((spec, SHAPES[0]) for spec in SPECS), *(("fewbit:3", shape) for shape in SHAPES[1:])]
)
def test_what_is_kept_is_what_layers_keep_and_its_closed_form(spec: str, shape: tuple[int, ...]) -> None:
    def kept(setup: TrainingSetup) -> inspection.Trace:
        return inspection.trace(setup, lambda: {"x": torch.randn(shape).requires_grad_()})

    called, held = (
        TrainingSetup(model, loss=lambda model, batch: model(batch["x"]).square().sum()) for model in twins(spec)
    )
    before = kept(called)
    scheme = schemes.build(spec)
    after, layers = scheme.apply(called), scheme.apply(held)
    packs = scheme.facet(Packs)
    assert packs is not None
    packed = 5 * math.ceil(math.prod(shape) * packs.bits / 8)

    trace = kept(after)
    assert trace.total_bytes == kept(layers).total_bytes
    sites, unreached = inspection.inspect(before, trace, after)
    assert [site.path for site in sites] == ["0", "2"]
    assert not unreached
    whole = 0 if spec != "invact" else 5 * 4 * math.prod(shape)  # the output, which nothing else keeps here
    assert sum(site.bytes_after or 0 for site in sites) - _kept_otherwise(before, shape) == packed + whole


def _kept_otherwise(before: inspection.Trace, shape: tuple[int, ...]) -> int:
    """Return what the modules that call keep besides: all that they did, but for the activations' input or output."""
    return sum(before.bytes_at(path) for path in ("0", "2")) - 5 * 4 * math.prod(shape)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_checkpointing_around_modules_that_call(spec: str, use_reentrant: bool) -> None:
    called, _ = converted_twins(spec)
    x = torch.randn(SHAPES[0])

    def run(x: Tensor) -> Tensor:
        for module in called:  # type: ignore[attr-defined]
            x = checkpoint(module, x, use_reentrant=use_reentrant)
        return x

    assert equal(gradients(called, x, run), gradients(called, x))


@pytest.mark.parametrize("spec", SPECS)
def test_with_checkpoint_as_a_scheme(spec: str) -> None:
    called, held = twins(spec)
    x = torch.randn(SHAPES[0])
    both = converted(copy.deepcopy(called), f"{spec}+checkpoint,blocks=Called")

    assert equal(gradients(both, x), gradients(converted(held, spec), x))


def test_with_hooks_that_pack_the_rest() -> None:
    called, held = converted_twins("fewbit:3")
    x = torch.randn(SHAPES[0])

    for model in (called, held):
        schemes.build("offload").apply(TrainingSetup(model))
    assert equal(gradients(called, x), gradients(held, x))


@pytest.mark.parametrize("spec", SPECS)
def test_retained_graphs_accumulation_and_several_calls(spec: str) -> None:
    x = torch.randn(SHAPES[0])
    for model in (found := converted_twins(spec)):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (model(model(x[:, :3])).sum() + model(x[:2]).sum()).backward()
    grads = [[parameter.grad for parameter in model.parameters()] for model in found]

    assert equal(*grads)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS)
def test_undo_takes_the_forwards_off(spec: str) -> None:
    model, _ = twins(spec)
    x, keys = torch.randn(SHAPES[0]), list(model.state_dict())
    before, plain = [dict(vars(part)) for part in model.modules()], gradients(model, x)
    model.zero_grad()

    found = actbench.convert(model, spec)
    assert found is model
    assert list(model.state_dict()) == keys
    conversion = conversion_of(model)
    assert conversion is not None
    assert len(conversion.sites) == 2
    gradients(model, x)
    conversion.undo()

    assert [dict(vars(part)) for part in model.modules()] == before
    assert equal(gradients(model, x), plain)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    called, held = converted_twins("fewbit:3")
    x = torch.randn(SHAPES[0])
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(called)
        found = gradients(called, x, parallel)
    finally:
        torch.distributed.destroy_process_group()

    assert equal(found, gradients(held, x))
