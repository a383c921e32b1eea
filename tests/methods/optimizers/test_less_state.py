"""Optimizers in place of Adam: their bytes, that they train, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actbench import scheme as schemes, workload as workloads
from actbench.errors import ConversionError, MeasurementError, NothingToConvertError, SpecError
from actbench.measuring import bench
from actbench.measuring.meters import footprint
from actbench.methods.optimizers.adammini import blocks_of
from actbench.model.records import Case
from actbench.scheme.setup import Batch, TrainingSetup, TrainStep

SPECS = (
    "galore:8",
    "fira:8",
    "apollo:8",
    "apollo:1,scaling=tensor,scale=11.3",
    "adam_mini",
    "muon8bit",
    "schedule_free",
)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def loss(module: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = (module(batch["x"]) - batch["y"]).square().mean()
    return result


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def setup(make: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> TrainingSetup:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 64))
    return TrainingSetup(module, loss=loss, make_optimizer=make)


def batch() -> Batch:
    random = torch.Generator().manual_seed(1)
    return {"x": torch.randn(32, 64, generator=random), "y": torch.randn(32, 64, generator=random)}


def test_blocks_are_heads_outputs_rows_and_vectors() -> None:
    llama = workloads.load_workload(Case(model="tiny-llama", batch_size=1)).setup(materialize=True, seed=0).module
    gpt2 = workloads.load_workload(Case(model="tiny-gpt2", batch_size=1)).setup(materialize=True, seed=0).module
    of_llama = {name: blocks_of(llama)[p].count for name, p in llama.named_parameters()}
    config: Any = llama.config

    assert of_llama["model.layers.0.self_attn.q_proj.weight"] == config.num_attention_heads
    assert of_llama["model.layers.0.self_attn.k_proj.weight"] == config.num_key_value_heads
    assert of_llama["model.layers.0.self_attn.v_proj.weight"] == config.num_key_value_heads * config.head_dim
    assert of_llama["model.layers.0.mlp.up_proj.weight"] == config.intermediate_size
    assert of_llama["model.embed_tokens.weight"] == config.vocab_size
    assert of_llama["model.norm.weight"] == 1
    fused: Any = gpt2.get_parameter("transformer.h.0.attn.c_attn.weight")  # (inputs, outputs)
    assert blocks_of(gpt2)[fused].count == fused.shape[1]


def test_the_matrices_of_an_adapter_are_not_cut_by_heads() -> None:
    llama = workloads.load_workload(Case(model="tiny-llama", batch_size=1)).setup(materialize=False, seed=0)
    model = schemes.build("lora:16").apply(llama).module
    blocks = blocks_of(model)
    within = "model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    config: Any = model.config

    assert blocks[model.get_parameter(within.format("A"))].count == 16
    assert blocks[model.get_parameter(within.format("B"))].count == config.num_attention_heads * config.head_dim


def test_both_matrices_of_an_adapter_are_trained() -> None:
    """The first gradient of A is zero, since B is."""

    def without_decay(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)

    step = TrainStep(schemes.build("lora:16+apollo:8").apply(setup(without_decay)), batch())
    before = {name: p.detach().clone() for name, p in step.setup.module.named_parameters() if p.requires_grad}
    for _ in range(3):
        step()

    after = dict(step.setup.module.named_parameters())
    assert any("lora_A" in name for name in before)
    assert not [name for name, old in before.items() if torch.equal(old, after[name])]


HIDDEN = [(128, 64), (32, 128)]
"""The matrices between the first and the last layer, as Muon counts them: all but the head."""


@pytest.mark.parametrize(
    ("spec", "of_hidden"),
    [
        ("galore:8", sum(2 * 8 * max(shape) + 8 * min(shape) for shape in HIDDEN)),
        ("fira:8", sum(2 * 8 * max(shape) + 8 * min(shape) + 1 for shape in HIDDEN)),
        ("apollo:8", sum(2 * 8 * max(shape) + 1 for shape in HIDDEN)),
        ("apollo:1,scaling=tensor", sum(2 * max(shape) + 1 for shape in HIDDEN)),
        ("adam_mini", sum(rows * columns + rows for rows, columns in HIDDEN)),
        ("schedule_free", sum(2 * rows * columns for rows, columns in HIDDEN)),
        ("muon8bit", sum(rows * columns / 4 + rows * columns / 256 for rows, columns in HIDDEN)),
    ],
)
def test_the_state_has_its_bytes(spec: str, of_hidden: float) -> None:
    step = TrainStep(schemes.build(spec).apply(setup()), batch())
    step()
    found = footprint.stored_bytes(footprint.optimizer_state(step.optimizer))

    head, biases = 64 * 32, 128 + 32 + 64
    others = head + 64 + biases + 3 if spec == "adam_mini" else 2 * (head + biases)
    assert found == 4 * (of_hidden + others)


@pytest.mark.sampled(fast=2, slow=3)
@pytest.mark.parametrize("spec", SPECS)
def test_it_trains(spec: str) -> None:
    step = TrainStep(schemes.build(spec).apply(setup()), batch())

    losses = [float(step()) for _ in range(150)]

    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("spec", SPECS)
def test_a_copy_steps_as_the_optimizer_does(spec: str) -> None:
    made = schemes.build(spec).apply(setup(lambda module: torch.optim.AdamW(module.parameters(), weight_decay=0.1)))
    step = TrainStep(made, batch())
    step()
    loss(made.module, batch()).backward()

    module, optimizer = copy.deepcopy((made.module, step.optimizer))
    for one, other in zip(made.module.parameters(), module.parameters(), strict=True):
        other.grad = one.grad
    step.optimizer.step()
    optimizer.step()

    assert all(map(torch.equal, made.module.parameters(), module.parameters()))


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_goes_on_from_saved_state(spec: str) -> None:
    whole = TrainStep(schemes.build(spec).apply(setup()), batch())
    for _ in range(3):
        whole()
    saved, weights = copy.deepcopy(whole.optimizer.state_dict()), copy.deepcopy(whole.setup.module.state_dict())
    whole()

    resumed = TrainStep(schemes.build(spec).apply(setup()), batch())
    resumed.setup.module.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed()

    for one, other in zip(whole.setup.module.parameters(), resumed.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", ["release+galore:8", "release+adam_mini", "release+schedule_free"])
def test_steps_within_the_backward_pass_give_the_same_weights(spec: str) -> None:
    found, expected = (
        TrainStep(schemes.build(each).apply(setup()), batch()) for each in (spec, spec.removeprefix("release+"))
    )
    for _ in range(3):
        found()
        expected()

    for one, other in zip(found.setup.module.parameters(), expected.setup.module.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("galore:8", "float32"),
        *(pytest.param(spec, "float32", marks=pytest.mark.sampled(slow=1)) for spec in SPECS[1:]),
        *(pytest.param(spec, "bfloat16", marks=pytest.mark.sampled(slow=1)) for spec in SPECS),
    ],
)
def test_the_simulation_agrees_with_the_allocator(spec: str, dtype: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    measured = bench.Session(Case(**fields, scheme=spec, dtype=dtype, meter="cpu")).memory()
    simulated = bench.Session(
        Case(**fields, scheme=spec, dtype=dtype, meter="simulated", device_profile="cpu")
    ).memory()

    assert simulated.optimizer_bytes == measured.optimizer_bytes
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02 if dtype == "bfloat16" else 0.005)


def test_another_optimizer_is_refused() -> None:
    changed = schemes.build("galore:8").apply(setup(lambda module: torch.optim.SGD(module.parameters(), lr=0.1)))

    with pytest.raises(ConversionError, match=r"galore: the optimizer is SGD"):
        TrainStep(changed, batch())


def test_a_rank_above_all_matrices_is_refused() -> None:
    with pytest.raises(NothingToConvertError, match="more than 128 rows and columns"):
        schemes.build("galore:128").apply(setup())


def test_two_that_say_how_state_is_kept_are_refused() -> None:
    with pytest.raises(SpecError, match="galore and adam8bit both say how optimizer state is kept"):
        schemes.build("galore+adam8bit")


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises((ConversionError, MeasurementError), match="adam_mini: it needs whole matrices"):
        bench.measure(Case(model="tiny-llama", batch_size=2, sequence_length=16, scheme="adam_mini+fsdp:2"))
