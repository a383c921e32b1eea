"""Adapters on frozen models, in full weights and in weights of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptedmodels import BOTH, Net, batch, built, setup_of, trained
from torch import nn

import actbench
from actbench import scheme as schemes, workload as workloads
from actbench.measuring import bench
from actbench.methods.lora.frozenlinear import FrozenLinear
from actbench.model.records import Case
from actbench.scheme.setup import TrainingSetup


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_trained_are_the_adapters_and_the_classifier() -> None:
    model = schemes.build("lora:4").apply(setup_of(Net())).module

    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sizes == {
        "first.lora_A.default.weight": 4 * 128,
        "first.lora_B.default.weight": 4 * 256,
        "second.lora_A.default.weight": 4 * 256,
        "second.lora_B.default.weight": 4 * 128,
        "classifier.modules_to_save.default.weight": 1280,
        "classifier.modules_to_save.default.bias": 10,
    }


@pytest.mark.parametrize("spec", ["lora:4,alpha=2", "qlora:4,alpha=2"])
def test_a_layer_computes_its_formula_and_the_gradients_are_those_of_autograd(spec: str) -> None:
    model: Any = schemes.build(spec).apply(setup_of(Net())).module
    layer = model.first
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b)
    base = actbench.base_state_dict(model)
    x = torch.randn(8, 128, requires_grad=True)

    found = layer(x)
    expected = x @ base["first.weight"].t() + base["first.bias"] + 2 / 4 * (x @ a.t()) @ b.t()

    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    mine = torch.autograd.grad((found * weights).sum(), [x, a, b])
    for one, other in zip(mine, torch.autograd.grad((expected * weights).sum(), [x, a, b]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_4_bits_have_their_bytes(dtype: str) -> None:
    model = schemes.build("qlora:4,target=q_proj").apply(built(dtype=dtype)).module

    packed = [part for part in model.modules() if isinstance(part, FrozenLinear)]
    assert len(packed) == 2 * 7  # with adapters and without
    for layer in packed:
        count = layer.in_features * layer.out_features
        held = sum(part.nbytes for part in layer.packed_weight)
        assert held == count // 2 + count // 64 + 4 * -(-count // 16384)
        assert held <= 0.53 * count
        assert layer.weight.dtype == getattr(torch, dtype)
    assert len(trained(model)) == 2 * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spec", BOTH)
def test_adapters_are_float32_beside_halves(spec: str, dtype: str) -> None:
    model = schemes.build(spec).apply(built(dtype=dtype)).module

    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(("model", "spec"), [("tiny-roberta", "lora"), ("tiny-gpt2", "qlora")])
def test_a_simulation_makes_the_same_parameters(model: str, spec: str) -> None:
    real = bench.Session(Case(model=model, batch_size=2, sequence_length=16, scheme=spec, meter="cpu")).setup.module
    fake = bench.Session(Case(model=model, batch_size=2, sequence_length=16, scheme=spec)).setup.module

    found, expected = (
        {name: (p.shape, p.dtype, p.requires_grad) for name, p in each.named_parameters()} for each in (fake, real)
    )
    assert found == expected


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("spec", ["lora", "qlora"])
def test_the_simulated_peak_is_that_of_the_allocator(spec: str) -> None:
    fields: dict[str, Any] = {"model": "tiny-llama", "batch_size": 4, "sequence_length": 64, "gradient_quality": False}
    measured = bench.Session(Case(**fields, scheme=spec, meter="cpu")).memory()
    simulated = bench.Session(Case(**fields, scheme=spec, meter="simulated", device_profile="cpu")).memory()

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    assert simulated.weights_bytes == measured.weights_bytes
    assert simulated.gradients_bytes == measured.gradients_bytes
    assert simulated.optimizer_bytes == measured.optimizer_bytes


@pytest.mark.exhaustive
def test_gradients_are_compared_with_those_of_the_same_parameters() -> None:
    fields: dict[str, Any] = {"model": "tiny-roberta", "batch_size": 4, "sequence_length": 16, "meter": "cpu"}

    def error(spec: str) -> float | None:
        return bench.Session(Case(**fields, scheme=spec)).memory().gradient_error

    assert error("lora:4") is None
    assert error("lora:4+checkpoint") == 0.0
    few, many = error("lora:4+gact:L1.2"), error("lora:4+gact:L1.1")
    assert few is not None
    assert many is not None
    assert 0 < many < few < 1


TOGETHER = "lora:16+chunked_loss:8+gact:L2"


@pytest.mark.slow
def test_a_stack_trains_adapters_alone_in_ones_own_loop() -> None:
    setup = built()
    model = actbench.convert(setup.module, TOGETHER)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    given = batch()

    losses = []
    for _ in range(40):
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert losses[0] - losses[-1] > 1  # nat; random tokens and a frozen head leave a floor
    assert changed == trained(model)
    assert all("lora_" in name for name in changed)


@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("stack", [TOGETHER, "qlora:16+chunked_loss:8+checkpoint"])
def test_a_stack_trains_in_the_trainer_and_its_adapters_load_into_the_plain_model(stack: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    plain, given = built().module, batch()
    model: Any = actbench.convert(built().module, stack)
    rows = [{name: value[row % 2] for name, value in given.items()} for row in range(32)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=40, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip

    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.save_pretrained(tmp_path / "adapters")

    assert losses[0] - losses[-1] > 1  # nat; random tokens and a frozen head leave a floor
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == trained(model)
    plain.load_state_dict(actbench.base_state_dict(model))
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**given).logits, model.eval()(**given).logits, rtol=1e-4, atol=1e-4)


def test_a_vision_transformer_gets_adapters_where_they_do_something() -> None:
    setup = schemes.build("lora:4").apply(workloads.load_workload(Case(model="vit_b_16", batch_size=1)).setup(
        materialize=False, seed=0
    ))  # fmt: skip

    assert {site.path.rpartition(".")[2] for site in setup.sites} == {"0", "3", "heads"}
    assert {left.path.rpartition(".")[2] for left in setup.unreached} == {"out_proj"}


@pytest.mark.parametrize("spec", BOTH)
@pytest.mark.parametrize(
    "odd",
    [nn.Module(), nn.LayerNorm((2, 3, 4)), nn.Conv1d(2, 3, 4)],
    ids=["a number for each channel", "a norm of pictures", "kernels"],
)
def test_only_stacks_of_matrices_are_listed_as_such(spec: str, odd: nn.Module) -> None:
    odd.register_parameter("layer_scale", nn.Parameter(torch.ones(8, 1, 1)))
    setup = schemes.build(spec).apply(TrainingSetup(nn.Sequential(nn.Linear(64, 64), odd)))

    assert setup.sites
    assert not setup.unreached


@pytest.mark.parametrize("spec", BOTH)
def test_experts_that_are_no_linear_layers_are_listed_with_what_they_weigh(spec: str) -> None:
    case = Case(
        model="mixtral-8x7b@num_hidden_layers=2,hidden_size=64,intermediate_size=96,vocab_size=64",
        batch_size=1,
        dtype="bfloat16",
    )
    exact = workloads.load_workload(case).setup(materialize=False, seed=0).module
    experts = {path: part for path, part in exact.named_modules() if path.endswith(".experts")}
    setup = schemes.build(spec).apply(workloads.load_workload(case).setup(materialize=False, seed=0))

    assert {left.path: left.kind for left in setup.unreached} == {
        path: type(part).__name__ for path, part in experts.items()
    }
    reason = setup.unreached[0].reason
    assert "gate_up_proj and down_proj" in reason
    assert ("not in 4 bits but in bfloat16" in reason) == (spec == "qlora")
    whole = [sum(parameter.nbytes for parameter in part.parameters()) for part in experts.values()]
    assert [left.weights_bytes for left in setup.unreached] == (whole if spec == "qlora" else [None, None])


def test_ranks_may_differ_from_part_to_part() -> None:
    model = schemes.build("lora:4,only=layers.0+lora:8,only=layers.1").apply(built()).module

    ranks = {name.split(".")[2]: p.shape[0] for name, p in model.named_parameters() if "lora_A" in name}
    assert ranks == {"0": 4, "1": 8}


def test_a_part_may_be_a_linear_layer_itself() -> None:
    model = schemes.build("lora:4,only=lm_head").apply(built()).module

    assert {name for name in trained(model) if name.startswith("lm_head")} == {
        "lm_head.lora_A.default.weight",
        "lm_head.lora_B.default.weight",
    }


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("spec", BOTH)
def test_adapters_are_measured_as_they_are_trained(spec: str) -> None:
    """``pure`` casts the model before it is given adapters, which stay in float32, in measurements too."""
    case = Case(model="tiny-llama", scheme=f"{spec}+pure+accumulate:2", meter="cpu", batch_size=2, sequence_length=16)
    measured = {name: p.dtype for name, p in bench.Session(case).setup.module.named_parameters()}
    applied = {name: p.dtype for name, p in schemes.build(case.scheme).apply(built()).module.named_parameters()}
    assert measured == applied
    assert {dtype for name, dtype in measured.items() if "lora_" in name} == {torch.float32}
